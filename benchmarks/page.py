"""``docs/benchmarks.md`` from what ``make bench`` measured: ``python benchmarks/page.py RESULTS.json > PAGE.md``.

RESULTS is pytest-benchmark's JSON. A row's ratio is its median over that of the group's first row, with the
interval between the quartiles of the two: the lower quartile of one over the upper of the other, and the other way
round. A benchmark that compares several things itself, in the same turns, has a table of its own: a row for each entry
of its ``extra_info``. Nothing is dropped and nothing added by hand but the sentences above the tables.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HEAD = """# Benchmarks

Generated from one run of `make bench` by `make bench-page`; do not edit. Times are processor time of the measuring
thread, but for the busy loop's on a clock. Every peer ran in the same run, on the same machine and interpreter. On
other machines the times differ and the ratios stay much the same; take none of them for a GPU's.

Behind a ratio to the first row is the range between the quartiles of both rows: how much single batches vary. The
percentages of the busy loop are medians over its turns, each compared with *bare* in the same turn; behind them is the
95 % confidence interval of the median, by order statistics, which narrows with the number of turns. *Bare again* is the
same as *bare*: its intervals should hold 0. The agent is a process on another core, which runs in the turns that are
its own and looks into the ring at the start of each. A server's rounds take longer than these: the last column is what
a hundred of them a second take from its scheduler's thread, by the clock. *Floor clock and pack per record* is what
the six records of a round cannot be had without in plain Python: of each one reading of the clock, one call that packs
it and one store that publishes it, and the page ids copied; no hook, lock, count or event pair.

{machine}

The goals are those the project set itself: the launching thread 5 us a round, 0.5 % of a scheduler's thread, the
analyzer 5 us for a decode round and 50 us for a restore of 80 layers, 300 million page checks a second from 1,000
pages on, 150 MB/s of a torch.profiler trace, 1.5 million rows a second of an Nsight Systems export.
"""
REAL_TIME = {
    "analyse a round: decode": "decode rounds a second",
    "analyse a round: restore, a record per layer": "rounds a second, each with a restore of 4,096 pages of 80 layers,",
}
"""Groups whose first row is one round, and what that is."""


def main(results: str) -> int:
    run = json.loads(Path(results).read_text(encoding="utf-8"))
    groups: dict[str, list[dict[str, Any]]] = {}
    for bench in run["benchmarks"]:
        groups.setdefault(bench["group"] or bench["name"], []).append(bench)
    print(HEAD.format(machine=_machine(run)))
    for group, what in REAL_TIME.items():
        if group in groups:
            median_s = groups[group][0]["stats"]["median"]
            print(
                f"A hundred {what} take the analyzer {_digits(median_s * 1e4)} % of a core: it is "
                f"{_digits(0.01 / median_s)} times faster than real time.\n"
            )
    for name in sorted(groups, key=_in_order):
        print("\n".join(_table(name, groups[name])))
    return 0


def _machine(run: dict[str, Any]) -> str:
    found = run["machine_info"]
    cpu = found.get("cpu", {})
    commit = run.get("commit_info", {})
    return (
        f"{cpu.get('brand_raw', found.get('processor') or 'unknown processor')}, {cpu.get('count', '?')} cores, "
        f"{found['python_implementation']} {found['python_version']}, {found['system']} {found['release']}; "
        f"{run['datetime'][:10]}, commit {str(commit.get('id'))[:7]}{' and changes' if commit.get('dirty') else ''}."
    )


def _table(group: str, benches: list[dict[str, Any]]) -> list[str]:
    if _compares(benches[0]):
        return [line for bench in benches for line in _comparison(group, bench["extra_info"])]
    unit, scale = _unit(benches[0]["stats"]["median"])
    first = benches[0]["stats"]
    extra = sorted({what for bench in benches for what in bench["extra_info"]})
    lines = [f"## {group[0].upper()}{group[1:]}", ""]
    lines.append(
        f"| row | least ({unit}) | median ({unit}) | ratio to the first row |" + "".join(f" {e} |" for e in extra)
    )
    lines.append("|---|---:|---:|---:|" + "---:|" * len(extra))
    for bench in benches:
        stats = bench["stats"]
        low, high = stats["q1"] / first["q3"], stats["q3"] / first["q1"]
        ratio = (
            ""
            if stats is first
            else f"{_digits(stats['median'] / first['median'])} ({_digits(low)} to {_digits(high)})"
        )
        more = "".join(f" {_shown(bench['extra_info'].get(what, ''))} |" for what in extra)
        least, median = _digits(stats["min"] * scale), _digits(stats["median"] * scale)
        lines.append(f"| {_row(bench)} | {least} | {median} | {ratio} |{more}")
    return [*lines, ""]


def _compares(bench: dict[str, Any]) -> bool:
    """Whether it compares several things itself."""
    extra = bench["extra_info"]
    return bool(extra) and all(isinstance(value, dict) for value in extra.values())


def _comparison(group: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"## {group[0].upper()}{group[1:]}", "", "| row |" + "".join(f" {name} |" for name in columns)]
    lines.append("|---|" + "---:|" * len(columns))
    for what, row in rows.items():
        lines.append(f"| {what} |" + "".join(f" {_shown(row.get(name, ''))} |" for name in columns))
    return [*lines, ""]


def _row(bench: dict[str, Any]) -> str:
    return str(bench["name"]).removeprefix("test_").replace("_", " ").replace("|", "/")


def _in_order(group: str) -> list[tuple[int, str]]:
    """Numbers in it by their size."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", group)]


def _digits(number: float) -> str:
    """Three of them that say something."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}" if number >= 0.01 else f"{number:.2g}"


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _unit(seconds: float) -> tuple[str, float]:
    return ("us", 1e6) if seconds < 1e-3 else ("ms", 1e3) if seconds < 1 else ("s", 1.0)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python benchmarks/page.py RESULTS.json > PAGE.md; make bench writes .cache/benchmarks.json")
    sys.exit(main(sys.argv[1]))
