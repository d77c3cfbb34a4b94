"""What is known of a process's linker: its transfers, the events they wait for, and who may know of their ends.

A transfer is known from the call that queues it and begins on another thread: on the one that has waited on the host
for all events that the call made. What that thread knows then is what orders the transfer behind the rounds.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from hicache_obs.findings import Hazard
from hicache_obs.records import ALL_LAYERS, MAX_ACCESSES, Access, IoKind, Mode, Space
from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.guard import Guard
from hicache_obs.sglang.page_ids import convert
from hicache_obs.sglang.pages import base_pool, page_size
from hicache_obs.sglang.session import Session
from hicache_obs.sglang.storage import MAX_WAITING

LOADED: Final = (Hazard.RDMA,)
"""What a linker's loads can be part of."""
OFFLOADED: Final = (Hazard.RAW_FORWARD_BACKUP, Hazard.WAR_BACKUP_FORWARD)
"""What its offloads can be part of."""


class LinkedTransfer:
    """A batch of loads, or an offload, from the call that queues it on.

    Attributes:
        moved: SGLang's descriptions of it (``PoolTransfer``), one per pool.
        events: Ids of the events of that call that nobody has waited for yet.
        index: Number of a load in its counter; ``None`` until the call has returned it.
        rids: Requests of a load.
        started: Whether it begins when its events are waited for; a load that is only queued does not.
        thread: The one it began on; ``None`` before.
    """

    __slots__ = (
        "_accesses",
        "_layer",
        "_links",
        "_open",
        "_site",
        "events",
        "index",
        "moved",
        "rids",
        "started",
        "thread",
    )

    def __init__(
        self, links: Links, moved: Sequence[Any], *, rids: Iterable[Any] | None = None, started: bool = True
    ) -> None:
        self.moved = moved
        self.started: Final = started
        self.events: set[int] = set()
        self.index: int | None = None
        self.rids: Final = None if rids is None else frozenset(rids)
        self.thread: int | None = None
        self._links: Final = links
        self._layer = 0
        self._accesses: list[tuple[Access, ...]] = []
        self._open: list[int] = []
        self._site: Final = "linker offload" if rids is None else "linker load"

    @property
    def is_load(self) -> bool:
        """Whether it writes device pages, layer by layer."""
        return self.rids is not None

    def expect(self, event_id: int) -> None:
        """The call that queues it has made an event. On the thread of that call."""
        if len(self._links.waiting) >= MAX_WAITING:
            self._links.waiting.clear()  # nobody waits for these; what they were for never begins, which is said
        self.events.add(event_id)
        self._links.waiting[event_id] = self

    def begin(self) -> None:
        """The calling thread has waited for its events: it may be under way from now on."""
        mode = Mode.WRITE if self.is_load else Mode.READ
        self._accesses = _accesses(self._links, self.moved, mode)
        self.thread = threading.get_ident()
        if self.is_load:
            self._begin(IoKind.RDMA_WRITE, (0, 1))
        else:
            self._begin(IoKind.DEVICE_READ, ALL_LAYERS)

    def end_layer(self, layer: int) -> None:
        """``layer`` of a load has arrived. On the thread that it began on. Partner of ``begin_layer``."""
        self.end()
        self._layer = layer + 1

    def begin_layer(self) -> None:
        """The layer behind the one that ended last is under way, if there is one."""
        if self._layer < self._links.num_layers:
            self._begin(IoKind.RDMA_WRITE, (self._layer, self._layer + 1))

    def fail(self) -> range:
        """The rest of a load will never arrive: the layers that are over by that."""
        self.end()
        rest, self._layer = range(self._layer, self._links.num_layers), self._links.num_layers
        return rest

    def end(self) -> None:
        """The calling thread knows what is under way of it to be over."""
        ended, self._open = self._open, []
        for io in ended:
            self._links.session.recorder.io_end(io)

    def _begin(self, kind: IoKind, layers: tuple[int, int]) -> None:
        recorder = self._links.session.recorder
        self._open = [recorder.io_begin(kind, accesses, site=self._site, layers=layers) for accesses in self._accesses]


class Links:
    """The transfers of one session's linker. Any thread may call any method.

    Args:
        name: Of the linker's class, for what is said of it.
        pools: Its pools by name, each with a ``device_pool``.
        num_layers: Of its counter.

    Attributes:
        queued: Loads that are not started, by request.
        loads: Batches of loads, from their start on.
        offloads: Offloads in the order of their results; ``None`` for one that was not recorded.
        waiting: Transfers by the events they wait for.
        layers: Channels of layers that are over, by number of the batch and layer.
    """

    def __init__(self, session: Session, name: str, pools: Any, num_layers: int) -> None:
        self.session: Final = session
        self.name: Final = name
        self.pools: Final = pools
        self.num_layers: Final = num_layers
        self.queued: dict[Any, LinkedTransfer] = {}
        self.loads: Final[deque[LinkedTransfer]] = deque(maxlen=MAX_WAITING)
        self.offloads: Final[deque[LinkedTransfer | None]] = deque()
        self.waiting: Final[dict[int, LinkedTransfer]] = {}
        self.layers: Final[dict[tuple[int, int], int]] = {}
        self._guard: Final = Guard(session, Adapter(f"{name}'s transfers", hazards=(*LOADED, *OFFLOADED)))

    def waited(self, event_id: int) -> None:
        """The calling thread knows an event to be complete. Never raises.

        A call that itself waits for an event that it made begins nothing: its transfer is for another thread.
        """
        transfer = self.waiting.pop(event_id, None)
        if transfer is None or self._guard.off:
            return
        try:
            transfer.events.discard(event_id)
            if transfer.started and not transfer.events and self.session.local.gated is not transfer:
                transfer.begin()
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            self._guard.failed(error)

    def start(self, queued: dict[Any, LinkedTransfer]) -> LinkedTransfer:
        """The batch of the ``queued`` loads, by request; it waits for the events of all of them."""
        load = LinkedTransfer(self, [one for request in queued.values() for one in request.moved], rids=queued)
        for request in queued.values():
            for event_id in tuple(request.events):
                load.expect(event_id)
        self.loads.append(load)
        return load

    def load(self, index: int) -> LinkedTransfer | None:
        """The batch with this number; before its call has returned that, the calling thread's own."""
        loads = tuple(self.loads)  # at once: the scheduler may start another one meanwhile
        found = next((one for one in loads if one.index == index), None)
        if found is None:
            here, gated = threading.get_ident(), self.session.local.gated
            found = next((one for one in loads if one.index is None and (one.thread == here or one is gated)), None)
        return found

    def post(self, index: int, layer: int) -> None:
        """The calling thread knows a layer to be over, and whoever waits for it will."""
        if len(self.layers) >= MAX_WAITING:
            self.layers.clear()  # nobody waits for these layers; one that does loses its edge, which is reported
        channel = self.session.number()
        self.session.recorder.thread_post(channel)
        self.layers[index, layer] = channel

    def receive(self, index: int) -> None:
        """The calling thread knows all layers of a batch to be over."""
        for layer in range(self.num_layers):
            channel = self.layers.pop((index, layer), None)
            if channel is not None:
                self.session.recorder.thread_recv(channel)
        load = self.load(index)
        if load is not None:
            self.drop(load)

    def drop(self, load: LinkedTransfer) -> None:
        """Forget a batch; it may be forgotten already: by ``clear``, on any thread, or for a newer one."""
        with contextlib.suppress(ValueError):
            self.loads.remove(load)

    def unseen(self, hazards: tuple[Hazard, ...], what: str) -> None:
        """``what`` the linker does that no hook sees makes ``hazards`` *not observable*."""
        self.session.unobservable(hazards, f"{self.name} {what}")

    def clear(self) -> None:
        """The calling thread knows all transfers to be over, and their results are gone."""
        for transfer in (*self.loads, *self.offloads):
            if transfer is not None:
                transfer.end()
        for table in (self.loads, self.offloads, self.waiting, self.layers):
            table.clear()
        self.queued = {}


def _accesses(links: Links, moved: Iterable[Any], mode: Mode) -> list[tuple[Access, ...]]:
    """The device pages of ``moved``, as many as a record holds at a time.

    ``host_indices`` are device slots once SGLang has translated them for a pool; before that ``device_indices`` are.
    """
    import torch

    found = []
    for transfer in moved:
        slots = transfer.host_indices if transfer.host_indices is not None else transfer.device_indices
        if slots is not None and slots.numel():
            pool = base_pool(links.pools[transfer.name].device_pool)
            how = convert(page_size(pool), skip_zero=True)
            with torch.cuda.device_of(slots):  # a linker's thread has another one, and would wake it up
                access = links.session.access(Space.DEVICE, mode, pool, slots, how)
            if access is not None:
                found.append(access)
    return [tuple(found[start : start + MAX_ACCESSES]) for start in range(0, len(found), MAX_ACCESSES)]
