"""``hicache-obs demo --tp N --pp M``: the check runs of the demo on several ranks, each a process."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from hicache_obs.analyzer.divergence import CollectiveOrder, Divergence
from hicache_obs.analyzer.tally import Defect
from hicache_obs.cli.demo_run import DemoOptions, DemoRun
from hicache_obs.cli.rank_flags import RankFlags
from hicache_obs.cli.rank_run import RankResult, RankTask, run_rank
from hicache_obs.cli.ranks_report import divergence_json
from hicache_obs.controller.rank_group import RankGrid
from hicache_obs.controller.rank_processes import RankProcesses
from hicache_obs.errors import ConfigError
from hicache_obs.findings import ExitCode, Verdict, worst

WAITING: Final = "waiting for decisions (ms)"
ROWS: Final = (
    "rounds",
    "restored pages",
    "pages checked",
    "violations (operation pairs)",
    "latent races",
    "corrupted pages (by content)",
    "wrong requests",
    "decisions",
    WAITING,
)
_MEASURED: Final = frozenset(
    {"fences", "fences_without_conflict", "fence_wait_ms_p50", "fence_wait_ms_p99", "avoidable_ms"}
)
"""What only a cost run says, of which ranks have none."""
_ALIKE: Final = ("rounds", "restored pages", "wrong requests", "decisions")
"""What ranks that decide alike have in common; of times the longest counts, and the rest adds up."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """What was asked for.

    Attributes:
        grid: The ranks.
        timeout_s: How long one waits for another.
        off: Protections that are taken out.
    """

    grid: RankGrid
    timeout_s: float
    off: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RanksMode:
    """One fence policy on all ranks.

    Attributes:
        fence: The policy.
        ranks: By number.
        off: Protections that were taken out.
    """

    fence: str
    ranks: tuple[RankResult, ...]
    off: tuple[str, ...] = ()

    @property
    def order(self) -> CollectiveOrder:
        """Collectives of all ranks."""
        order = CollectiveOrder()
        for rank in self.ranks:
            order.merge(rank.order)
        return order

    @property
    def divergences(self) -> list[Divergence]:
        """Where ranks enter different collectives."""
        return self.order.divergences()

    @property
    def finding(self) -> tuple[int, Defect] | None:
        """A rank and its first finding, ``None`` if no rank has any."""
        found = ((number, rank.mode.first()) for number, rank in enumerate(self.ranks))
        return next(((number, defect) for number, defect in found if defect is not None), None)

    @property
    def decided_alike(self) -> bool:
        """All ranks' logs have the same entries."""
        return len({rank.digest for rank in self.ranks}) == 1

    def exit_code(self, accepts: Callable[[str], bool]) -> ExitCode:
        """The worst of the ranks'; ranks that differ are a finding, unless their decision log was taken out."""
        codes = [rank.mode.exit_code(accepts) for rank in self.ranks]
        if (self.divergences or not self.decided_alike) and "decision-log" not in self.off:
            codes.append(ExitCode.FINDINGS)
        return worst(codes)

    def as_json(self, grid: RankGrid, *, timed: bool) -> dict[str, Any]:
        """The documented JSON entry; ``timed``: as of ``tables``."""
        return {
            "fence": self.fence,
            "off": list(self.off),
            "collectives_compared": self.order.compared,
            "tp_divergence": [divergence_json(divergence) for divergence in self.divergences],
            "ranks": [
                {
                    "rank": number,
                    "tp": place.tp,
                    "pp": place.pp,
                    "decisions": rank.decisions,
                    "decision_digest": rank.digest,
                    "decision_wait_ms": rank.waited_ns / 1e6 if timed else None,
                    **{name: value for name, value in rank.mode.as_json().items() if name not in _MEASURED},
                }
                for number, (place, rank) in enumerate(zip(grid.ranks, self.ranks, strict=True))
            ],
        }


def rank_options(flags: RankFlags, options: DemoOptions, *, elsewhere: Sequence[str]) -> RankOptions:
    """On which ranks to run ``options``.

    Args:
        flags: More than one rank.
        options: Of the demo.
        elsewhere: Flags that were given and have no meaning with ranks.

    Raises:
        ConfigError: Ranks cannot run this.
    """
    grid, device, runner = RankGrid(flags.tp, flags.pp), options.device, options.engine.runner
    if elsewhere:
        raise ConfigError(f"{elsewhere[0]}: shows one engine's run; expected no --tp and no --pp with it")
    if device == "cuda":
        raise ConfigError(f"--device {device}: ranks run without a GPU; expected threads or virtual")
    if grid.pp > 1 and flags.off:
        raise ConfigError(f"--off {flags.off[0]}: stages need each other's rounds; expected --pp 1 with it")
    if grid.pp > 1 and runner != "transformer":
        raise ConfigError(f"--pp {grid.pp}: --runner {runner} has no stages; expected transformer")
    if grid.pp > 1 and device == "virtual":
        raise ConfigError(f"--pp {grid.pp}: on --device {device} a stage cannot wait for another; expected threads")
    grid.stages(options.engine.layers)
    return RankOptions(grid, flags.rank_timeout, flags.off)


def run_ranks(options: DemoOptions, ranks: RankOptions) -> list[RanksMode]:
    """Run every policy on all ranks, after the reference run in this process. Blocks.

    Args:
        options: What to run.
        ranks: On which ranks.

    Raises:
        RankError: A rank was lost.
        HicacheObsError: What a rank raised.
    """
    reference = DemoRun(options, progress=lambda name, done, total: None).reference()
    with tempfile.TemporaryDirectory(prefix="hicache-obs-ranks-") as folder:
        first = RankTask(ranks.grid, options, reference, Path(folder), ranks.timeout_s, ranks.off)
        other = dataclasses.replace(first, options=dataclasses.replace(options, requests=()))
        tasks = [first] + [other] * (ranks.grid.size - 1)
        results = RankProcesses(run_rank, ranks.grid.names, tasks, timeout_s=ranks.timeout_s).results()
    modes = []
    for number, fence in enumerate(options.fences):
        of_all = []
        for result in results:
            assert isinstance(result, list)
            of_all.append(result[number])
        modes.append(RanksMode(fence, tuple(of_all), ranks.off))
    return modes


# -- output --------------------------------------------------------------------------------------------------


def tables(grid: RankGrid, modes: Sequence[RanksMode], *, timed: bool) -> Iterator[Table]:
    """One table per policy: a column per rank, and one for all of them.

    Args:
        grid, modes: What has run.
        timed: Whether the time that ranks took says anything: on the virtual device it does not.
    """
    for mode in modes:
        table = Table(title=f"fence policy {mode.fence}", title_justify="left")
        table.add_column("")
        for rank in grid.ranks:
            table.add_column(f"tp {rank.tp}, pp {rank.pp}", justify="right")
        table.add_column("all", justify="right")
        columns = [_column(rank) for rank in mode.ranks]
        for row, values in zip(ROWS, zip(*columns, strict=True), strict=True):
            if row == WAITING and not timed:
                continue
            form = "{:,.1f}" if row == WAITING else "{:,}"
            table.add_row(row, *(form.format(value) for value in values), _combined(row, values, form))
        yield table


def remarks(mode: RanksMode) -> Iterator[str]:
    """What the table does not say."""
    for divergence in mode.divergences:
        yield f"{mode.fence}: tp_divergence at {divergence}"
    if not mode.divergences:
        yield (
            f"{mode.fence}: all ranks enter the same collectives, {mode.order.compared:,} of them"
            + (", and decide the same." if mode.decided_alike and not mode.off else ".")
        )


def _column(rank: RankResult) -> list[float]:
    """Values of ``ROWS``."""
    mode = rank.mode
    return [
        mode.rounds,
        mode.restored_pages,
        mode.pages_checked,
        mode.verdicts(Verdict.VIOLATION),
        mode.verdicts(Verdict.LATENT),
        mode.corrupted_pages,
        mode.wrong_requests,
        rank.decisions,
        rank.waited_ns / 1e6,
    ]


def _combined(row: str, values: Sequence[float], form: str) -> str:
    if row not in _ALIKE:
        return form.format(max(values) if row == WAITING else sum(values))
    return form.format(values[0]) if len(set(values)) == 1 else "they differ"
