"""What the metrics of a node's ranks say in one word, with how much it rests on.

The dashboards use the same rule; only here an unwatched rank is not SAFE either.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from hicache_obs.exporters.prometheus import Metrics
from hicache_obs.exporters.rank_metrics import RankMetrics
from hicache_obs.findings import Hazard
from hicache_obs.records import CaptureMode, Ranks


class Outcome(enum.Enum):
    """The worst that holds, best first; the value is what is shown."""

    NOT_CHECKED = "NOT CHECKED"
    SAFE = "SAFE"
    BLIND = "BLIND"
    LATENT = "LATENT RACES"
    CONTRADICTION = "CONTRADICTION"
    VIOLATED = "VIOLATED"


@dataclass(frozen=True, slots=True)
class Health:
    """Totals of one rank, or of several, since the exporting process started.

    Attributes:
        violations, contradictions, latent, unknown, checked: Operation pairs.
        records, lost: Records analysed; records lost before they could be.
        accepted: Operation pairs of findings that somebody has accepted; in none of the others but ``checked``.
        blind: Ranks that run unwatched: their ring cannot be read or judged, or recording is switched off.
    """

    violations: int = 0
    contradictions: int = 0
    latent: int = 0
    unknown: int = 0
    checked: int = 0
    records: int = 0
    lost: int = 0
    accepted: int = 0
    blind: int = 0

    @property
    def outcome(self) -> Outcome:
        """SAFE needs a checked pair, and nothing found, undecided, lost or unwatched."""
        if self.violations:
            return Outcome.VIOLATED
        if self.contradictions:
            return Outcome.CONTRADICTION
        if self.latent:
            return Outcome.LATENT
        if self.unknown or self.lost or self.blind:
            return Outcome.BLIND
        return Outcome.SAFE if self.checked else Outcome.NOT_CHECKED

    @property
    def coverage(self) -> float | None:
        """Share of records analysed times share of checked pairs that could be judged; ``None``: nothing checked."""
        if not self.checked or not self.records:
            return None
        return self.records / (self.records + self.lost) * max(0.0, 1 - self.unknown / self.checked)


@dataclass(frozen=True, slots=True)
class RankHealth:
    """One rank.

    Attributes:
        rank, totals: Whose, and what was found.
        mode: What its process does; ``None`` without a running process whose ring can be read.
        unread: Records in its rings that the agent has not read yet.
        heartbeat_ns, analysed_ns: Wall clock when its recorder last said it is alive, and when records were last
            analysed; 0 if never.
        observable: Hazards whose records are captured.
    """

    rank: Ranks
    totals: Health
    mode: CaptureMode | None
    unread: int
    heartbeat_ns: int
    analysed_ns: int
    observable: frozenset[Hazard]


def read_health(metrics: Metrics) -> list[RankHealth]:
    """Every rank, worst first; safe on any thread."""
    ranks = [_read(metrics.rank(rank)) for rank in metrics.known_ranks]
    outcomes = list(Outcome)
    return sorted(
        ranks, key=lambda r: (-outcomes.index(r.totals.outcome), -r.totals.blind, r.rank.dp, r.rank.pp, r.rank.tp)
    )


def summed(ranks: Sequence[RankHealth]) -> Health:
    """All ranks as one."""
    names = Health.__dataclass_fields__
    return Health(**{name: sum(getattr(rank.totals, name) for rank in ranks) for name in names})


def _read(of: RankMetrics) -> RankHealth:
    mode = _mode(of.value("capture_mode")) if of.value("rings") else None
    return RankHealth(
        rank=of.rank,
        totals=Health(
            violations=of.total("violations_total"),
            contradictions=of.total("contradictions_total"),
            latent=of.total("latent_races_total"),
            unknown=of.total("unknown_total"),
            checked=of.total("checks_total"),
            records=of.total("records_total"),
            lost=of.total("dropped_records_total"),
            accepted=of.total("accepted_total"),
            blind=int(of.value("blind") or mode is CaptureMode.OFF),
        ),
        mode=mode,
        unread=of.value("unread_records"),
        heartbeat_ns=of.value("heartbeat_timestamp_seconds"),
        analysed_ns=of.value("last_analysis_timestamp_seconds"),
        observable=frozenset(hazard for hazard in Hazard if of.value("hazard_observable", hazard.value)),
    )


def _mode(value: int) -> CaptureMode | None:
    return CaptureMode(value) if value in list(CaptureMode) else None
