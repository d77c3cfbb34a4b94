"""What the fences of one run cost, and what exact ones would have cost: for cells of a grid, and for journals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hicache_obs.analyzer.tally import DEFINITE, Tally
from hicache_obs.costs import FenceCost, TransferCost, TransferKind
from hicache_obs.findings import Hazard, Verdict

NAMES: Final = {TransferKind.RESTORE: "load-backs", TransferKind.BACKUP: "write-backs"}
"""Kinds of transfers, for people."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of times that occurred, in nanoseconds; all 0 if there are none."""

    count: int
    p50_ns: int
    p99_ns: int
    mean_ns: int

    @classmethod
    def of(cls, times_ns: Sequence[int]) -> Quantiles:
        """The smallest time that is not exceeded by the share; no time in between two."""
        if not times_ns:
            return cls(0, 0, 0, 0)
        p50, p99 = (int(np.quantile(times_ns, share, method="inverted_cdf")) for share in (0.5, 0.99))
        return cls(len(times_ns), p50, p99, sum(times_ns) // len(times_ns))

    def as_json(self) -> dict[str, Any]:
        """Milliseconds."""
        return {
            "count": self.count,
            "p50_ms": self.p50_ns / 1e6,
            "p99_ms": self.p99_ns / 1e6,
            "mean_ms": self.mean_ns / 1e6,
        }


@dataclass(slots=True)
class Waits:
    """What the fences in front of one kind of transfer waited for.

    Attributes:
        waited_ns: Of each fence.
        needed_ns: Of each fence: what is left of its wait with exact edges, as the fence policy ``page`` has them.
        by_hazard_ns: Needed time in all, by what would have raced.
    """

    waited_ns: list[int] = field(default_factory=list)
    needed_ns: list[int] = field(default_factory=list)
    by_hazard_ns: Counter[Hazard] = field(default_factory=Counter)

    @property
    def in_all_ns(self) -> tuple[int, int, int]:
        """Waited, needed and avoidable."""
        waited, needed = sum(self.waited_ns), sum(self.needed_ns)
        return waited, needed, waited - needed

    def as_json(self) -> dict[str, Any]:
        """The documented JSON entry; milliseconds."""
        waited, needed, avoidable = self.in_all_ns
        return {
            "count": len(self.waited_ns),
            "waited_ms": waited / 1e6,
            "needed_ms": needed / 1e6,
            "avoidable_ms": avoidable / 1e6,
            "waited": Quantiles.of(self.waited_ns).as_json(),
            "needed": Quantiles.of(self.needed_ns).as_json(),
            "needed_ms_by_hazard": {hazard.value: ns / 1e6 for hazard, ns in sorted(self.by_hazard_ns.items())},
        }


class FenceTally(Tally):
    """A tally that keeps what the fences had to wait for, and how long every load-back took.

    Attributes:
        waits: By kind of transfer.
        restores_ns: Of each load-back: from its submission, its fence included, to the end of its last copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = {kind: Waits() for kind in TransferKind}
        self.restores_ns: list[int] = []

    def on_fence(self, cost: FenceCost) -> None:
        super().on_fence(cost)
        waits = self.waits[cost.kind]
        waits.waited_ns.append(cost.waited_ns)
        waits.needed_ns.append(cost.waited_ns - cost.avoidable_ns)
        waits.by_hazard_ns.update(cost.needed_ns)

    def on_transfer(self, cost: TransferCost) -> None:
        super().on_transfer(cost)
        if cost.kind is TransferKind.RESTORE:
            self.restores_ns.append(cost.op_ns)

    def count(self, verdicts: Sequence[Verdict]) -> int:
        """Operation pairs with one of ``verdicts``."""
        return sum(self.verdicts[verdict] for verdict in verdicts)

    def verdicts_json(self) -> dict[str, int]:
        """Operation pairs by verdict."""
        return {verdict.value: self.verdicts[verdict] for verdict in (*DEFINITE, Verdict.UNKNOWN)}

    def fences_json(self) -> dict[str, Any]:
        """What the fences cost, by kind of transfer."""
        return {kind.value: waits.as_json() for kind, waits in self.waits.items()}
