"""The status page of an agent or a demo: verdict, newest findings, health of each rank. One document, no script."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

from hicache_obs import __version__
from hicache_obs.analyzer import explain
from hicache_obs.exporters.accepted import Acceptance, Accepted
from hicache_obs.exporters.findings_board import Entry
from hicache_obs.exporters.health import Health, Outcome, RankHealth, summed
from hicache_obs.exporters.markup import Html, joined, tag
from hicache_obs.findings import Hazard, Verdict
from hicache_obs.records import CaptureMode, Ranks

MAX_FINDINGS: Final = 20
RELOAD_S: Final = 10
DOCS: Final = "/docs/metrics"
_COLORS: Final = {
    Outcome.NOT_CHECKED: "warn",
    Outcome.SAFE: "good",
    Outcome.BLIND: "warn",
    Outcome.LATENT: "warn",
    Outcome.CONTRADICTION: "bad",
    Outcome.VIOLATED: "bad",
}
_BAD: Final = (Verdict.VIOLATION, Verdict.CONTRADICTION)
_MODES: Final = {CaptureMode.OFF: "off", CaptureMode.OBSERVE: "observe", CaptureMode.ENFORCE: "enforce"}
_COLUMNS: Final = (
    "rank", "verdict", "mode", "pairs checked", "records", "lost", "unread", "last beat", "last analysis",
)  # fmt: skip


def status_page(
    ranks: Sequence[RankHealth],
    entries: Sequence[Entry],
    *,
    accepted: Accepted,
    now_ns: int,
    facts: Mapping[str, str],
    reload: bool = False,
) -> str:
    """The page.

    Args:
        ranks: Worst first.
        entries: Findings, newest first.
        accepted: Findings that are marked as accepted, after the others.
        now_ns: Wall clock, nanoseconds since the epoch.
        facts: Further lines of the foot, by name.
        reload: Tell the browser to load it again every ``RELOAD_S`` seconds.
    """
    total = summed(ranks)
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        *([tag("meta", http_equiv="refresh", content=str(RELOAD_S))] if reload else []),
        tag("title", f"{total.outcome.value} – hicache-obs"),
        tag("style", Html(STYLE)),
    ]
    body = [
        tag("header", tag("h1", "hicache-obs"), _links(reload)),
        _verdict(total, ranks),
        _numbers(total),
        tag("h2", "Newest findings"),
        *_findings(entries, accepted, now_ns),
        tag("h2", "Ranks"),
        _ranks(ranks, now_ns),
        _unseen(ranks),
        _foot(facts, now_ns),
    ]
    page = tag("html", tag("head", *head), tag("body", tag("main", *body)), lang="en")
    return f"<!doctype html>\n{page}\n"


def _links(reload: bool) -> Html:
    again = tag("a", "stop reloading", href="/") if reload else tag("a", f"reload every {RELOAD_S} s", href="/?reload")
    return tag(
        "nav", tag("a", "metrics", href="/metrics"), " ", tag("a", "what each metric means", href=DOCS), " ", again
    )


# -- verdict -------------------------------------------------------------------------------------------------


def _verdict(total: Health, ranks: Sequence[RankHealth]) -> Html:
    outcome = total.outcome
    return tag(
        "section",
        tag("p", outcome.value, class_="word"),
        tag("p", _sentence(total, ranks)),
        tag("p", _coverage(total, ranks), class_="quiet"),
        class_=f"verdict {_COLORS[outcome]}",
    )


def _sentence(total: Health, ranks: Sequence[RankHealth]) -> str:
    if total.outcome is Outcome.VIOLATED:
        return (
            f"{_count(total.violations, 'operation pair')} overlapped or ran in reverse with nothing to order them: "
            "pages, and answers built on them, may be wrong."
        )
    if total.outcome is Outcome.CONTRADICTION:
        return (
            f"{_count(total.contradictions, 'operation pair')} proven ordered, yet measured in the wrong order: "
            "a fence is not where it seems to be, or a clock lies."
        )
    if total.outcome is Outcome.LATENT:
        return (
            f"Nothing orders {_count(total.latent, 'operation pair')}. Each ran in the right order this time, or was "
            "not measured."
        )
    if total.outcome is Outcome.BLIND:
        return f"No race was found, but not everything was seen: {', '.join(_blind_spots(total, ranks))}."
    if total.outcome is Outcome.SAFE:
        idle = sum(not rank.totals.checked for rank in ranks)
        some = f" {idle} of {len(ranks)} ranks had nothing to check." if idle else ""
        known = f" but the {total.accepted:,} that {_are(total.accepted)} accepted" if total.accepted else ""
        return f"{_count(total.checked, 'operation pair')} checked, and every one is ordered{known}.{some}"
    if not ranks:
        return "No rank has been seen: nothing was checked, which is not the same as safe."
    return "No conflicting operation pair has been seen: nothing was checked, which is not the same as safe."


def _blind_spots(total: Health, ranks: Sequence[RankHealth]) -> list[str]:
    spots = []
    if total.blind:
        spots.append(f"{_unwatched(ranks)} unwatched")
    if total.lost:
        spots.append(f"{_count(total.lost, 'record')} lost")
    if total.unknown:
        spots.append(f"{_count(total.unknown, 'operation pair')} could not be judged")
    return spots


def _unwatched(ranks: Sequence[RankHealth]) -> str:
    return ", ".join(name(rank.rank) for rank in ranks if rank.totals.blind)


def _coverage(total: Health, ranks: Sequence[RankHealth]) -> str:
    unwatched = f" Unwatched: {_unwatched(ranks)}." if total.blind else ""
    if total.coverage is None:
        return f"Coverage: none.{unwatched}"
    share = min(total.coverage * 100, 100.0 if total.coverage == 1 else 99.99)
    return (
        f"Coverage {share:.4g} %: {total.records:,} of {_count(total.records + total.lost, 'record')} analysed, "
        f"{max(0, total.checked - total.unknown):,} of {_count(total.checked, 'checked pair')} judged.{unwatched}"
    )


def _numbers(total: Health) -> Html:
    shown = {
        "violations": (total.violations, "bad"),
        "contradictions": (total.contradictions, "bad"),
        "latent races": (total.latent, "warn"),
        "not judged": (total.unknown, "warn"),
        "records lost": (total.lost, "warn"),
        "pairs checked": (total.checked, ""),
        **({"accepted": (total.accepted, "")} if total.accepted else {}),
    }
    return tag(
        "dl",
        *(
            tag("div", tag("dt", what), tag("dd", f"{value:,}", class_=color if value else ""))
            for what, (value, color) in shown.items()
        ),
        class_="numbers",
    )


# -- findings ------------------------------------------------------------------------------------------------


def _findings(entries: Sequence[Entry], accepted: Accepted, now_ns: int) -> list[Html]:
    if not entries:
        return [tag("p", "None.", class_="quiet")]
    by_name: dict[str, list[Entry]] = {}
    for entry in entries:
        by_name.setdefault(entry.finding.fingerprint, []).append(entry)
    known = [(accepted.of(group[0].finding), group) for group in by_name.values()]
    groups = sorted(known, key=lambda one: one[0] is not None)
    cards = [
        _finding(group, acceptance, now_ns, first=number == 0)
        for number, (acceptance, group) in enumerate(groups[:MAX_FINDINGS])
    ]
    if len(groups) > MAX_FINDINGS:
        cards.append(tag("p", f"… and {len(groups) - MAX_FINDINGS} older kinds", class_="quiet"))
    return cards


def _finding(entries: Sequence[Entry], acceptance: Acceptance | None, now_ns: int, *, first: bool) -> Html:
    """One fingerprint on all ranks; the text is about the one that was seen last."""
    entry = entries[0]
    finding = entry.finding
    count = sum(other.count for other in entries)
    color = "bad" if finding.verdict in _BAD else "warn"
    if acceptance is not None:
        color = "quiet"
    seen = ", ".join(name(rank) for rank in sorted({other.rank for other in entries}, key=place))
    summary = tag(
        "summary",
        tag("code", finding.fingerprint),
        " ",
        tag("b", finding.verdict.value.upper(), class_=color),
        " ",
        *([tag("b", "ACCEPTED"), " "] if acceptance is not None else []),
        tag("span", finding.hazard.value),
        " ",
        tag("span", f"{_count(count, 'pair')} on {seen}, last {_ago(entry.seen_ns, now_ns)}", class_="quiet"),
    )
    title, _, text = explain(finding, entry.radius).partition("\n")
    _, mark, secondary = title.partition("(")
    lines = [tag("p", mark + secondary, class_="quiet")] if secondary else []
    if entry.radius is None and not finding.misuse:
        lines.append(tag("p", "What it has spoiled is not known yet.", class_="quiet"))
    if acceptance is not None:
        lines.append(tag("p", f"Accepted until {acceptance.expires}, UTC: {acceptance.reason}"))
    content = [_explained(text.strip("\n")), *lines]
    return tag("details", summary, *content, **({"open": ""} if first else {}))


def _explained(text: str) -> Html:
    """The paragraphs of an explained finding, and its labelled lines as a list."""
    parts = []
    for labelled, lines in groupby(text.split("\n"), key=lambda line: line.startswith("  ")):
        if not labelled:
            parts += [tag("p", line) for line in lines if line]
            continue
        rows = []
        for line in lines:
            label, _, rest = line.strip().partition(" ")
            rows.append(joined([tag("dt", label), tag("dd", rest.strip())]))
        parts.append(tag("dl", *rows, class_="facts"))
    return joined(parts)


# -- ranks ---------------------------------------------------------------------------------------------------


def _ranks(ranks: Sequence[RankHealth], now_ns: int) -> Html:
    if not ranks:
        return tag("p", "None has been seen.", class_="quiet")
    heading = tag("tr", *(tag("th", column, scope="col") for column in _COLUMNS))
    table = tag("table", tag("thead", heading), tag("tbody", *(_rank(rank, now_ns) for rank in ranks)))
    return tag("div", table, class_="wide", tabindex="0")


def _rank(rank: RankHealth, now_ns: int) -> Html:
    totals = rank.totals
    mode, alarm = ("no process", "quiet") if rank.mode is None else (_MODES[rank.mode], "")
    if rank.mode is CaptureMode.OFF:
        alarm = "warn"
    elif totals.blind:
        mode, alarm = "unwatched", "bad"
    cells = [
        (totals.outcome.value, _COLORS[totals.outcome]),
        (mode, alarm),
        (f"{totals.checked:,}", "number"),
        (f"{totals.records:,}", "number"),
        (f"{totals.lost:,}", "number warn" if totals.lost else "number"),
        (f"{rank.unread:,}", "number"),
        (_ago(rank.heartbeat_ns, now_ns), ""),
        (_ago(rank.analysed_ns, now_ns), ""),
    ]
    return tag("tr", tag("th", name(rank.rank), scope="row"), *(tag("td", text, class_=color) for text, color in cells))


def _unseen(ranks: Sequence[RankHealth]) -> Html:
    """Hazards that some rank cannot show."""
    seen = frozenset(Hazard).intersection(*(rank.observable for rank in ranks)) if ranks else frozenset[Hazard]()
    hidden = [hazard.value for hazard in Hazard if hazard not in seen]
    if not hidden or not ranks:
        return Html()
    return tag(
        "p",
        f"{len(seen)} of {len(Hazard)} kinds of race can be seen on every rank. Not seen, which is not the same as "
        f"absent: {', '.join(hidden)}.",
        class_="quiet",
    )


def _foot(facts: Mapping[str, str], now_ns: int) -> Html:
    made = datetime.datetime.fromtimestamp(now_ns // 1_000_000_000, datetime.timezone.utc)
    lines = {"version": __version__, **facts, "this page": f"made {made:%Y-%m-%d %H:%M:%S} UTC"}
    return tag("footer", *(tag("span", f"{key}: {value}") for key, value in lines.items() if value))


def place(rank: Ranks) -> tuple[int, int, int]:
    """Sorts ranks."""
    return rank.dp, rank.pp, rank.tp


def name(rank: Ranks) -> str:
    """``dp0 pp0 tp3``, without the dimensions before it that are 0."""
    return f"{f'dp{rank.dp} ' if rank.dp else ''}{f'pp{rank.pp} ' if rank.pp else ''}tp{rank.tp}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _ago(then_ns: int, now_ns: int) -> str:
    """How long ago; a clock that was set back makes it the future, and that is said."""
    if not then_ns:
        return "never"
    seconds = (now_ns - then_ns) / 1e9
    if seconds < -1:
        return f"{_span(-seconds)} ahead of this clock"
    return f"{_span(max(0.0, seconds))} ago"


def _span(seconds: float) -> str:
    for limit, unit, text in ((100, 1, "s"), (100 * 60, 60, "min"), (72 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {text}"
    return f"{seconds / 86400:.0f} d"


STYLE: Final = """
:root { --ground: #fff; --text: #1c1e21; --quiet: #5c6470; --line: #d9dde3; --card: #f6f7f9;
  --good: #14703a; --warn: #8a5300; --bad: #b3261e; --link: #0b57d0; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181c; --text: #e4e6ea; --quiet: #9aa3af; --line: #343a43;
  --card: #1f2329; --good: #5fd08a; --warn: #f2b34c; --bad: #ff8a80; --link: #8ab4f8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1rem; }
header { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; align-items: baseline; justify-content: space-between; }
h1 { font-size: 1.1rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; }
a { color: var(--link); }
p { margin: .4rem 0; }
code, .facts dd, .facts dt { font-family: ui-monospace, monospace; font-size: .875rem; }
.quiet { color: var(--quiet); }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.verdict { margin: 1rem 0; padding: .75rem 1.25rem; border-left: .5rem solid; background: var(--card); }
.verdict p { color: var(--text); } .verdict .quiet { color: var(--quiet); }
.verdict .word { font-size: 2rem; font-weight: 700; line-height: 1.2; margin: 0; color: inherit; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .5rem; margin: 0; }
.numbers div { padding: .4rem .75rem; border: 1px solid var(--line); }
.numbers dt { color: var(--quiet); font-size: .875rem; }
.numbers dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
details { border: 1px solid var(--line); margin: .5rem 0; padding: .5rem .9rem; }
summary { cursor: pointer; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
.facts dt { color: var(--quiet); } .facts dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
.wide { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 0; width: 100%; white-space: nowrap; }
th, td { text-align: left; padding: .35rem .75rem; border-bottom: 1px solid var(--line); font-weight: 400; }
thead th { color: var(--quiet); font-size: .875rem; }
tbody th { font-weight: 600; position: sticky; left: 0; background: var(--ground); }
.number { text-align: right; font-variant-numeric: tabular-nums; }
thead th:nth-child(n+4):nth-child(-n+7) { text-align: right; }
footer { display: flex; flex-wrap: wrap; gap: .15rem 1.5rem; margin-top: 2rem; padding-top: .5rem;
  border-top: 1px solid var(--line); color: var(--quiet); font-size: .875rem; overflow-wrap: anywhere; }
@media (max-width: 36rem) { .facts { grid-template-columns: 1fr; gap: 0; } .facts dd { margin-bottom: .4rem; } }
@media print { :root { --ground: #fff; --text: #000; --quiet: #444; --line: #999; --card: #fff; }
  nav { display: none; } h2 { break-after: avoid; } .numbers { grid-template-columns: repeat(6, 1fr); }
  details { break-inside: avoid; } .wide { overflow: visible; } table { white-space: normal; }
  details::details-content { content-visibility: visible; display: block; } }
"""
