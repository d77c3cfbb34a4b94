"""What the traces of several ranks say together: whether all of them enter the same collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hicache_obs.analyzer.divergence import CollectiveOrder, Divergence
from hicache_obs.cli.verdict import OUTCOMES
from hicache_obs.findings import ExitCode, Hazard
from hicache_obs.trace import Names, Trace


@dataclass(frozen=True, slots=True)
class RanksReport:
    """What the traces of several ranks gave together.

    Attributes:
        source: Where they were read from.
        order: What the ranks enter.
    """

    source: str
    order: CollectiveOrder

    @property
    def divergences(self) -> list[Divergence]:
        """Where ranks enter different collectives; one per group at most."""
        return self.order.divergences()

    @property
    def code(self) -> ExitCode:
        """Exit code."""
        if self.divergences:
            return ExitCode.FINDINGS
        return ExitCode.NOTHING_CHECKED if self.order.cut or not self.order.compared else ExitCode.CLEAN

    @property
    def outcome(self) -> str:
        """``clean``, ``findings``, ``unknown`` or ``nothing-checked``."""
        if self.code is ExitCode.NOTHING_CHECKED and self.order.compared:
            return "unknown"
        return OUTCOMES[self.code]

    @property
    def sentence(self) -> str:
        """As of ``judge.sentence``."""
        compared = f"{self.order.compared:,} collectives of {len(self.order.ranks)} ranks compared"
        words = {
            "clean": f"SAFE: all ranks enter the same collectives; {compared}",
            "findings": f"VIOLATED: ranks enter different collectives ({Hazard.TP_DIVERGENCE.value}); {compared}",
            "unknown": f"NOT DECIDABLE: records were lost, so later collectives were not compared; {compared}",
            "nothing-checked": f"NOTHING CHECKED: no two ranks enter collectives of one group; {compared}",
        }
        return words[self.outcome]

    @property
    def lines(self) -> list[str]:
        """One per divergence, for people."""
        return [f"{Hazard.TP_DIVERGENCE.value} at {divergence}" for divergence in self.divergences]

    def as_json(self) -> dict[str, Any]:
        """The documented JSON object."""
        return {
            "file": self.source,
            "outcome": self.outcome,
            "collectives_compared": self.order.compared,
            "tp_divergence": [divergence_json(divergence) for divergence in self.divergences],
        }


def compare_ranks(source: str, traces: Sequence[Trace]) -> RanksReport | None:
    """What ``traces``, one per rank, say together; ``None`` if no rank has recorded collectives."""
    order = CollectiveOrder()
    for trace in traces:
        of_one = CollectiveOrder()
        of_one.feed(trace, Names())
        order.merge(of_one)
    return RanksReport(source, order) if order.ranks else None


def divergence_json(divergence: Divergence) -> dict[str, Any]:
    """A divergence as JSON."""
    return {
        "group": divergence.group,
        "place": divergence.place,
        "entered": [{"rank": entry.rank, "collective": entry.name} for entry in divergence.entered],
    }
