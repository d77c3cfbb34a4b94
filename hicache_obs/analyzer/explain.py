"""A finding in words that a newcomer understands. Rendered from the data of ``Finding`` and a trace's names only."""

from __future__ import annotations

from collections.abc import Sized
from typing import Final

from hicache_obs.analyzer.remedy import RemedyKind, Timeline, public_report, remedies
from hicache_obs.findings import AccessInfo, BlastRadius, Cause, Finding, Hazard, Shared, Timing, Verdict
from hicache_obs.trace import Names

_STORY: Final = {
    Hazard.WAW_FORWARD_RESTORE: (
        "A load-back restored pages that an already launched forward round was still going to write. "
        "Whichever comes last wins: if the round does, the restored prefix is silently wrong."
    ),
    Hazard.WAR_FORWARD_RESTORE: (
        "A load-back overwrote pages that an already launched forward round was still reading, so that round "
        "may have attended to another request's KV."
    ),
    Hazard.RAW_RESTORE_FORWARD: (
        "A forward round read pages before their load-back was known to be done, so it may have attended to "
        "what was there before."
    ),
    Hazard.RAW_FORWARD_BACKUP: (
        "A write-back copied pages to host memory before the forward round that fills them was known to be done, "
        "so the host copy, and every later restore from it, may be wrong."
    ),
    Hazard.WAR_BACKUP_FORWARD: (
        "A forward round wrote pages that a write-back was still copying to host memory, so the host copy may mix "
        "two requests."
    ),
    Hazard.HOST_REUSE: ("Two operations use the same host page, at least one writes it, and nothing keeps them apart."),
    Hazard.METADATA_WAR: (
        "Two operations use the same buffer (indices, staging, flags), at least one writes it, and nothing keeps "
        "them apart."
    ),
}
_DEFAULT_STORY: Final = "Two operations touch the same pages, at least one writes, and nothing keeps them apart."
_REMEDY: Final = {
    RemedyKind.EVENT: "waiting for the operation alone would have taken",
    RemedyKind.STREAM: "for its whole stream",
    RemedyKind.HOST: "in the calling thread",
}
_VERB: Final = {"read": "reads", "write": "writes"}


def explain(
    finding: Finding,
    radius: BlastRadius | None = None,
    times: Timeline | None = None,
    names: Names | None = None,
) -> str:
    """Several lines: what happened, what ran where, why nothing orders it, what it spoiled, and how to fix it.

    With ``times`` also what each fix would have cost, and a public report of the same kind if one is known. Buffers and
    pools have their ``names``, or numbers.
    """
    names = Names() if names is None else names
    if finding.misuse:
        return _misuse(finding, names)
    title = f"{finding.fingerprint}  {finding.verdict.value.upper()}  {finding.hazard.value}"
    if finding.secondary:
        title += "  (secondary: one of these pages had raced before)"
    zero = min((side.start_ns for side in (finding.earlier, finding.later) if side.start_ns is not None), default=0)
    lines = [
        title,
        "",
        _STORY.get(finding.hazard, _DEFAULT_STORY),
        "",
        f"  {_what(finding, names)}{_layers(finding.layers)}",
        f"  earlier  {_access(finding.earlier, zero)}",
        f"  later    {_access(finding.later, zero)}",
        f"  measured {_measured(finding)}",
        f"  proof    {_proof(finding)}",
        *([] if radius is None else [f"  spoiled  {_radius(radius)}"]),
        f"  fix      {fix(finding)}",
        *([] if times is None else _context(finding, times)),
    ]
    return "\n".join(lines)


def _misuse(finding: Finding, names: Names) -> str:
    """The text of a finding about who owns the pages."""
    call, use, away = finding.earlier, finding.later, finding.cause is Cause.USED_AFTER_FREE
    if away:
        story = "An operation was issued on pages that had been given away: whoever gets them next shares them with it."
    else:
        story = "Nothing has written these pages since they were given out: the reader sees what was left there."
    return "\n".join(
        [
            f"{finding.fingerprint}  {finding.verdict.value.upper()}  {finding.hazard.value}",
            "",
            story,
            "",
            f"  {_what(finding, names)}",
            f"  given {'away' if away else 'out '} by host thread {call.thread}, op {call.op}",
            f"  then     {_access(use, 0)}",
            f"  proof    op {use.op} was issued after op {call.op}, whatever the device does",
            f"  fix      {fix(finding)}",
        ]
    )


def _access(access: AccessInfo, zero_ns: int) -> str:
    """Who, what, where, and when in microseconds since ``zero_ns``, the start of the first of the two."""
    where = f"stream '{access.stream}'" if access.stream is not None else f"host thread {access.thread}"
    number = f" {'round' if access.what == 'forward' else 'transfer'} {access.group}"
    when = ""
    if access.start_ns is not None and access.end_ns is not None:
        when = f", ran from {(access.start_ns - zero_ns) / 1e3:,.1f} to {(access.end_ns - zero_ns) / 1e3:,.1f} us"
    what = access.what + (number if access.stream is not None else "")
    which = f"op {access.op} ({access.site}){_layers(access.layers)}"
    return f"{what} {_VERB[access.mode]} them on {where}, {which}{when}"


def _measured(finding: Finding) -> str:
    first, second = finding.earlier, finding.later
    if finding.timing is Timing.UNTIMED:
        return "no device times for this pair"
    if finding.timing is Timing.KEPT:
        return "this time the order was kept; nothing guarantees it next time"
    gap = (first.start_ns or 0) - (second.end_ns or 0)
    if gap >= 0:
        return f"reversed: the later operation was over {gap / 1e3:,.1f} us before the earlier one began"
    early = (first.end_ns or 0) - (second.start_ns or 0)
    return f"overlap: the later operation began {early / 1e3:,.1f} us before the earlier one ended"


def _proof(finding: Finding) -> str:
    edge = finding.missing_edge
    if finding.verdict is Verdict.CONTRADICTION:
        return "an edge orders them, yet the times say otherwise: a fence is not where we think, or a clock lies"
    text = f"nothing makes '{edge.waiter}' wait for '{edge.on}' up to op {edge.after} before op {edge.before}"
    if finding.cause is Cause.WRONG_STREAM and finding.later.stream is None:
        text += f"; the host did synchronise, with '{finding.wrong_waiter}', which ran none of it"
    elif finding.cause is Cause.WRONG_STREAM:
        text += f"; a fence that covers op {edge.after} was put on '{finding.wrong_waiter}', "
        text += f"but op {edge.before} ran on '{edge.waiter}'"
    elif finding.cause is Cause.WRONG_THREAD:
        text += f"; another host thread did wait for op {edge.after}, but not the one that issued op {edge.before}"
    elif finding.cause is Cause.THREAD_RACE:
        text += f"; the thread that issued op {edge.before} was not told that op {edge.after} was over"
    elif finding.cause is Cause.EARLY_EVENT:
        text += f"; there is a wait for '{edge.on}', on an event recorded too early to cover op {edge.after}"
    elif finding.cause is Cause.EVENT_REUSE:
        text += f"; there is a wait, on an event that was recorded after op {edge.after} and then recorded again "
        text += "elsewhere before the wait, which takes the newest record"
    elif finding.cause is Cause.EVENT_UNRECORDED:
        text += "; there is a wait, on an event that had never been recorded, which orders nothing"
    elif finding.cause is Cause.RECORDS_LOST:
        text = "records were lost between the two, so an edge may be missing from the trace"
    elif finding.cause is Cause.SHARED_EVENT:
        text = "a wait in between is for an event that another process may have recorded; what it orders is not here"
    elif finding.cause is Cause.SHARED_MEMORY:
        text = "another process shares this memory and may keep the two apart in a way that is not recorded"
    elif finding.cause is Cause.EARLY_START:
        text = f"op {edge.before} may start before op {edge.after} has ended (programmatic dependent launch); "
        text += "whether it waits inside is not recorded"
    return text


def _radius(radius: BlastRadius) -> str:
    """``3 requests, 12 rounds (5–17), 34 device pages``; what there is none of is left out."""
    rounds = _count(radius.rounds, "round")
    if radius.rounds:
        low, high = radius.rounds[0], radius.rounds[-1]
        rounds += f" ({low})" if low == high else f" ({low}–{high})"
    parts = [
        _count(radius.requests, "request"),
        rounds,
        _count(radius.ios, "storage or network transfer"),
        _count(radius.device_pages, "device page"),
        _count(radius.host_pages, "host page"),
    ]
    found = ", ".join(part for part in parts if part)
    if radius.exact:
        return found or "nothing"
    text = f"at most {found}" if found and radius.complete else found or "nothing else"
    return text if radius.complete else text + ", and what was forgotten"


def _count(things: Sized, noun: str) -> str:
    number = len(things)
    return f"{number} {noun}{'' if number == 1 else 's'}" if number else ""


def _context(finding: Finding, times: Timeline) -> list[str]:
    """What the fixes cost, and who has met the like."""
    lines = []
    costs = [
        f"{_REMEDY[remedy.kind]} {remedy.delay_ns / 1e3:,.1f} us"
        for remedy in remedies(finding, times)
        if remedy.delay_ns is not None
    ]
    if costs:
        how = "measured" if times.measured else "planned"
        lines.append(f"  cost     {', '.join(costs)}, from {how} times")
    report = public_report(finding)
    if report:
        lines.append(f"  report   {report} is of the same kind")
    return lines


def fix(finding: Finding) -> str:
    """What to change, in one line."""
    edge = finding.missing_edge
    if finding.cause is Cause.USED_AFTER_FREE:
        return f"give the pages away after op {finding.later.op} is issued, or leave them out of it"
    if finding.cause is Cause.NEVER_WRITTEN:
        return f"fill the pages before op {finding.later.op}, or leave them out of it"
    if finding.verdict is Verdict.CONTRADICTION:
        return "check the stream of both operations and the clock error before trusting either"
    if finding.cause is Cause.WRONG_THREAD:
        return f"before op {edge.before} is issued: its thread has to wait itself, or to be told by the one that did"
    if finding.cause is Cause.THREAD_RACE:
        return (
            f"before op {edge.before} is issued: its thread has to learn from '{edge.on}' that op {edge.after} is over"
        )
    if finding.earlier.stream is None:
        return f"before op {edge.before} is issued: wait for the end of op {edge.after}"
    if finding.later.stream is None:
        return f"before op {edge.before}: synchronise with an event recorded on '{edge.on}' after op {edge.after}"
    if finding.cause is Cause.WRONG_STREAM:
        return f"put the fence on '{edge.waiter}', the stream that runs op {edge.before}"
    wait = f"{edge.waiter}.wait_stream({edge.on})"
    return f"before op {edge.before} is issued: {wait}, or wait for an event recorded after op {edge.after}"


def _what(finding: Finding, names: Names) -> str:
    """``device page 5 of pool 'draft', and buffer 'indices'``."""
    main = Shared(finding.space, finding.pool, finding.pages)
    return ", and ".join(_shared(shared, names) for shared in (main, *finding.also))


def _shared(shared: Shared, names: Names) -> str:
    noun, plural = "buffer" if shared.space == "buffer" else f"{shared.space} page", "s" * (len(shared.pages) != 1)
    if shared.space == "buffer":
        named = [f"'{names.buffers[number]}'" for number in shared.pages[:8] if number in names.buffers]
        complete = len(named) == len(shared.pages)
        return f"{noun}{plural} {', '.join(named) if complete else _ids(shared.pages)}"
    pools = names.host_pools if shared.space == "host" else names.pools
    pool = f" of pool '{pools.get(shared.pool, str(shared.pool))}'" if shared.pool else ""
    return f"{noun}{plural} {_ids(shared.pages)}{pool}"


def _ids(ids: tuple[int, ...]) -> str:
    """``3-5, 9`` for ``(3, 4, 5, 9)``; at most eight runs."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:8]]
    more = f", ... ({len(ids)} in all)" if len(runs) > 8 else ""
    return ", ".join(texts) + more


def _layers(layers: tuple[int, int]) -> str:
    low, high = layers
    if high >= 2**31 - 1:
        return "" if low == 0 else f", layers from {low}"
    return f", layer {low}" if high == low + 1 else f", layers {low}-{high - 1}"
