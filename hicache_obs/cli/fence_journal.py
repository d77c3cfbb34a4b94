"""``bench-fences --journal``: what the fences of a recorded run cost, and what page-exact ones would have left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from hicache_obs.analyzer import Analyzer
from hicache_obs.cli.fence_tally import NAMES, FenceTally, Quantiles
from hicache_obs.cli.judge import journals_at
from hicache_obs.cli.verdict import STEP
from hicache_obs.errors import naming
from hicache_obs.findings import ExitCode
from hicache_obs.readers import open_trace


@dataclass(frozen=True, slots=True)
class Priced:
    """One journal.

    Attributes:
        source: Where it is.
        tally: Findings and costs.
        pairs_checked: Page pairs that the analyzer looked at.
        shared: Accesses to memory that another process may touch.
    """

    source: str
    tally: FenceTally
    pairs_checked: int
    shared: int

    @property
    def code(self) -> ExitCode:
        """Findings first; a run without a fence that has times has nothing to price."""
        code = self.tally.exit_code(self.pairs_checked, self.shared)
        if code is ExitCode.CLEAN and not self.tally.fences:
            return ExitCode.NOTHING_CHECKED
        return code

    @property
    def lines(self) -> list[str]:
        """In words."""
        found = []
        for kind, waits in self.tally.waits.items():
            if waits.waited_ns:
                waited, needed, avoidable = waits.in_all_ns
                share = f" ({avoidable / waited:.1%} avoidable)" if waited else ""
                p99 = Quantiles.of(waits.waited_ns).p99_ns, Quantiles.of(waits.needed_ns).p99_ns
                found.append(
                    f"{self.source}: {len(waits.waited_ns):,} fences before {NAMES[kind]} waited {waited / 1e6:,.2f} ms"
                    f"{share}; page-exact ones would have left {needed / 1e6:,.2f} ms, at p99 {p99[0] / 1e6:,.3f} → "
                    f"{p99[1] / 1e6:,.3f} ms each."
                )
        return found or [f"{self.source}: no fence with device times before a transfer; there is nothing to price."]

    def as_json(self) -> dict[str, Any]:
        """The documented JSON entry."""
        return {
            "file": self.source,
            "outcome": {ExitCode.CLEAN: "clean", ExitCode.FINDINGS: "findings"}.get(self.code, "nothing-checked"),
            "pairs_checked": self.pairs_checked,
            "fences": self.tally.fences_json(),
            "restore": Quantiles.of(self.tally.restores_ns).as_json(),
            "verdicts": self.tally.verdicts_json(),
            "text": " ".join(self.lines),
        }


def price(path: Path, progress: Callable[[str, int, int], None]) -> list[Priced]:
    """Every journal at ``path``: of each rank, or of each folder in it.

    Raises:
        TraceError: One cannot be read.
    """
    return [_price(place, rank, progress) for place, rank in journals_at(path)]


def _price(path: Path, rank: int | None, progress: Callable[[str, int, int], None]) -> Priced:
    trace = open_trace(path, rank=rank)
    source = str(trace.source) if rank is None else f"{path}, rank {rank}"
    tally = FenceTally()
    analyzer = Analyzer(tally)
    with naming(source):
        for begin in range(0, len(trace), STEP):
            analyzer.feed(trace.records[begin : begin + STEP])
            progress(source, min(begin + STEP, len(trace)), len(trace))
    analyzer.finish()
    return Priced(source, tally, analyzer.totals.lookups, analyzer.totals.shared)


def table(priced: list[Priced]) -> Table:
    """Two lines per journal, by its folder or file; the sentences below have the whole path."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("journal", overflow="fold")
    for name in ("before", "fences", "waited ms", "needed ms", "avoidable", "p99 ms"):
        made.add_column(name, justify="left" if name == "before" else "right", no_wrap=True)
    for each in priced:
        for kind, waits in each.tally.waits.items():
            times_ns = (*waits.in_all_ns, Quantiles.of(waits.waited_ns).p99_ns)
            figures = (f"{time_ns / 1e6:,.2f}" for time_ns in times_ns)
            made.add_row(each.source.rpartition("/")[2], NAMES[kind], f"{len(waits.waited_ns):,}", *figures)
    return made
