"""``PairProofs``: is a given pair of operations ordered, whatever it touches. For traces without page sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hicache_obs.analyzer.check import Analyzer
from hicache_obs.analyzer.order import Actor
from hicache_obs.analyzer.tally import Tally
from hicache_obs.findings import Proof
from hicache_obs.records import GraphReplay, Kernel, Memcpy, OpId, Record, Times


@dataclass(frozen=True, slots=True)
class PairProof:
    """The answer for one pair.

    Attributes:
        earlier, later: The operations; *earlier* was issued first.
        proof: What orders them.
        since, at: Positions of *earlier* and *later* in the trace.
    """

    earlier: OpId
    later: OpId
    proof: Proof
    since: int
    at: int


@dataclass(frozen=True, slots=True)
class _Place:
    actor: Actor
    epoch: int
    seq: int


class PairProofs(Analyzer):
    """Answers for chosen pairs of kernels, copies and graph replays without entries; accesses and times are not
    looked at, and no kernel starts early. Feed it a trace; a pair is answered when its later operation comes.

    Args:
        wanted: By the later operation: the earlier ones.

    Attributes:
        proofs: One for each pair whose operations are both in the trace, in issue order.
    """

    def __init__(self, wanted: Mapping[OpId, Sequence[OpId]]) -> None:
        super().__init__(Tally())
        self._wanted = wanted
        self._needed = {earlier for ops in wanted.values() for earlier in ops}
        self._places: dict[OpId, _Place] = {}
        self.proofs: list[PairProof] = []

    def _take_run(self, records: Sequence[Record]) -> int:
        return 0

    def _on_work(self, record: Kernel | Memcpy) -> None:
        self._run(record, self._order.issue(record.stream, record.thread))

    def _on_graph_replay(self, record: GraphReplay) -> None:
        assert not record.nodes
        stream = self._launch(record)
        self._run(record, stream)
        self._graphs[record.graph] = self._order.note(stream, self._seq)

    def _on_times(self, record: Times) -> None:
        """Times prove nothing."""

    def _run(self, record: Kernel | Memcpy | GraphReplay, actor: Actor) -> None:
        order = self._order
        for earlier in self._wanted.get(record.op, ()):
            place = self._places.get(earlier)
            if place is not None:
                proof = order.proof(actor, place.actor, place.epoch)
                if proof is Proof.NONE and place.seq < order.doubt_at:
                    proof = Proof.UNKNOWN
                self.proofs.append(PairProof(earlier, record.op, proof, place.seq, self._seq))
        epoch = order.advance(actor)
        if record.op in self._needed:
            self._places[record.op] = _Place(actor, epoch, self._seq)
