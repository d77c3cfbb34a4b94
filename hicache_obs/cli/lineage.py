"""Where wrong contents came from: which transfers moved a page, and whether a finding names one of them."""

from __future__ import annotations

from hicache_obs.analyzer.tally import Tally
from hicache_obs.controller.cache_controller import SubmittedTransfer
from hicache_obs.controller.radix_node import joined, last_nodes
from hicache_obs.controller.transfer_engine import TransferEngine
from hicache_obs.findings import Finding, Shared
from hicache_obs.records import Direction, PageIds


class Lineage:
    """Which transfers have moved the contents of a restored page; matches wrong pages with findings.

    Listens to the controller (every transfer), the scheduler (every move) and the analyzer (every finding). Contents
    are named by the tenancy that produced them, which they keep on every tier.
    """

    def __init__(self) -> None:
        self._moved: dict[int, set[tuple[int, int, int]]] = {}  # tenancy -> (transfer, pool, place)
        self._restored: dict[tuple[int, int], int] = {}  # (step, device page) -> tenancy
        self._raced: set[tuple[int, int, int]] = set()
        self._holds: dict[int, int] = {}  # device page -> tenancy restored to it last, or moved there since
        self._arrived: dict[tuple[int, int], tuple[int, int | None]] = {}  # (step, moved to) -> from where, and what
        self._moves_raced: set[int] = set()

    def on_move(self, step: int, old: PageIds, new: PageIds) -> None:
        held = [(page, self._holds.get(page)) for page in old.tolist()]
        for page, (origin, tenancy) in zip(new.tolist(), held, strict=True):
            self._arrived[step, page] = origin, tenancy
            self._holds.pop(page, None)
            if tenancy is not None:
                self._holds[page] = tenancy

    def on_transfer(self, transfer: SubmittedTransfer, engine: TransferEngine) -> None:
        for operation in transfer.operations:
            page_tokens = len(operation.node.tokens) // len(operation.node.host_sources)
            nodes = last_nodes(operation.node, page_tokens * len(operation.device_pages))
            tenancies = joined([node.host_sources for node in nodes]).tolist()
            for pool, places in engine.places(operation.device_pages):
                for place, tenancy in zip(places.tolist(), tenancies, strict=True):
                    self._moved.setdefault(tenancy, set()).add((transfer.transfer, pool, place))
            for device_page, tenancy in zip(operation.device_pages.tolist(), tenancies, strict=True):
                if transfer.direction is Direction.HOST_TO_DEVICE:
                    self._restored[transfer.step, device_page] = tenancy
                    self._holds[device_page] = tenancy

    def on_finding(self, finding: Finding) -> None:
        for side in (finding.earlier, finding.later):
            if side.what in ("restore", "backup"):
                for shared in (Shared(finding.space, finding.pool, finding.pages), *finding.also):
                    if shared.space == "device":
                        self._raced.update((side.group, shared.pool, page) for page in shared.pages)
            if side.what == "relocate":
                self._moves_raced.update(finding.pages)

    def explains(self, step: int, device_page: int) -> bool:
        """Whether a finding covers a transfer of what the load-back of ``device_page`` in ``step`` restored.

        For a page that moved there in ``step``: the move, or a transfer of what was moved.
        """
        place = (step, device_page)
        tenancy = self._restored.get(place)
        if tenancy is None:
            origin, tenancy = self._arrived[place]
            if not self._moves_raced.isdisjoint((origin, device_page)):
                return True
        return tenancy is not None and not self._raced.isdisjoint(self._moved[tenancy])


class ExplainingTally(Tally):
    """A tally that also tells the lineage about findings."""

    def __init__(self, lineage: Lineage) -> None:
        super().__init__()
        self._lineage = lineage

    def on_finding(self, finding: Finding) -> None:
        super().on_finding(finding)
        self._lineage.on_finding(finding)
