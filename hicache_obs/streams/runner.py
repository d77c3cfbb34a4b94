"""The virtual device's clock and queues: gives every item a legal start, and its function follows.

Three things happen to an item. It is *queued* by a host call; it is *placed* when the schedule runs it, which
fixes its start, never before the host clock, and its end; and its function is called when the host clock
passes its start, in order of starts. It is *complete* once the host clock has passed its end. So the times,
the order of the data effects (the host's own between two calls included) and the answers of queries agree.

Single-threaded: the first thread that makes a call owns the device, unless an oracle lets threads take turns.
All times are integer nanoseconds.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from hicache_obs.errors import DeadlockError, StreamError
from hicache_obs.streams.cost import CostModel
from hicache_obs.streams.launching import Failures, run_launched
from hicache_obs.streams.schedule import Queued, Schedule

MAX_FALSE_ANSWERS: Final = 64
"""So many times in a row a query of one item may be answered False; the next one forces it.

A schedule that runs nothing unasked would let a polling loop spin for ever; a real device always gets there.
"""


class Lane:
    """One stream's queue. ``free_ns`` is when its last placed item ends."""

    __slots__ = ("free_ns", "items", "name", "tail")

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: deque[Item] = deque()
        self.tail: Item | None = None
        self.free_ns = 0


class Item:
    """One op, record marker or wait.

    Attributes:
        fn: What an op runs; ``None`` for records and waits.
        dependency: The record a wait waits for; dropped once placed, so that history is not kept alive.
        on_begin, on_end: A probe's callbacks.
    """

    __slots__ = (
        "dependency",
        "duration_ns",
        "end_ns",
        "false_answers",
        "fn",
        "is_wait",
        "issue_ns",
        "lane",
        "on_begin",
        "on_end",
        "placed",
        "seq",
        "site",
        "start_ns",
    )

    def __init__(
        self,
        lane: Lane,
        *,
        fn: Callable[[], None] | None = None,
        site: str = "",
        duration_ns: int = 0,
        is_wait: bool = False,
        dependency: Item | None = None,
    ) -> None:
        self.lane = lane
        self.fn = fn
        self.site = site
        self.duration_ns = duration_ns
        self.is_wait = is_wait
        self.dependency = dependency
        self.on_begin: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self.seq = self.issue_ns = self.start_ns = self.end_ns = self.false_answers = 0
        self.placed = False

    def __str__(self) -> str:
        kind = f"op of site {self.site!r}" if self.fn is not None else "wait" if self.is_wait else "record"
        return f"item {self.seq} ({kind}) of stream {self.lane.name!r}"

    @property
    def runnable(self) -> bool:
        """Whether this item, at the head of its queue, can be placed."""
        return self.dependency is None or self.dependency.placed


class Oracle(Protocol):
    """Answers queries in place of the clock. With one, host threads may share the device if they take turns.

    Use it with ``lazy``: there an item has run only if the host has observed it, or something that follows it.
    """

    def forced(self) -> None:
        """A query was answered True because its item is complete, or there is none."""

    def choose(self, item: Item) -> bool:
        """The answer for an item that is not complete; True makes the device run up to it."""


class Runner:
    """Clock, queues and their rules; a ``Schedule`` makes the choices. It is the schedule's ``Board``."""

    def __init__(self, schedule: Schedule, cost: CostModel, oracle: Oracle | None = None) -> None:
        self.now_ns = 0
        self.failures = Failures()
        self.lanes: list[Lane] = []
        self._schedule = schedule
        self._cost = cost
        self._oracle = oracle
        self._owner: int | None = None
        self._issued = 0
        self._placed = 0
        self._device_free_ns = 0
        self._effects: list[tuple[int, int, Item]] = []

    # What a schedule asks.

    def heads(self) -> list[Item]:
        """See ``Board.heads``."""
        found = []
        for lane in self.lanes:  # asked twice for every host call
            if lane.items:
                head = lane.items[0]
                if head.dependency is None or head.dependency.placed:
                    found.append(head)
        return found

    def ancestors(self, targets: Sequence[Queued]) -> list[Item]:
        """See ``Board.ancestors``."""
        reached: dict[Lane, int] = {}
        found: list[Item] = []
        todo = [item for item in targets if isinstance(item, Item)]
        while todo:
            target = todo.pop()
            after = reached.get(target.lane, 0)
            if target.placed or target.seq <= after:
                continue
            reached[target.lane] = target.seq
            new = [item for item in target.lane.items if after < item.seq <= target.seq]
            found += new
            todo += [item.dependency for item in new if item.dependency is not None]
        found.sort(key=lambda item: item.seq)
        return found

    # What the device's calls do.

    def call(self, *items: Item) -> None:
        """One host call that queues ``items``: costs host time, then the device runs what it runs unasked."""
        self.advance(self._cost.host_call_ns)
        for item in items:
            self._issued += 1
            item.seq = self._issued
            item.issue_ns = self.now_ns
            item.lane.items.append(item)
            item.lane.tail = item
        self._run_unasked()

    def query(self, item: Item | None) -> bool:
        """One host call that asks whether ``item`` is complete; ``None`` stands for nothing to complete."""
        self.advance(self._cost.host_call_ns)
        self._run_unasked()
        if item is None or self.complete(item):
            if self._oracle is not None:
                self._oracle.forced()
            return True
        pending = item.false_answers < MAX_FALSE_ANSWERS if self._oracle is None else not self._oracle.choose(item)
        if pending:
            item.false_answers += 1
            return False
        self._force([item])
        return True

    def wait_for(self, items: Iterable[Item | None]) -> None:
        """One host call that blocks until all of ``items`` are complete; raises what a function raised."""
        self.advance(self._cost.host_call_ns)
        self._run_unasked()
        self._force([item for item in items if item is not None])
        self.failures.raise_pending()

    def complete(self, item: Item) -> bool:
        """Whether the host clock has passed the end of ``item``. Changes nothing; any thread."""
        return item.placed and item.end_ns <= self.now_ns

    def advance(self, duration_ns: int) -> None:
        """The host is busy for ``duration_ns``; the device goes on with what is placed."""
        thread = threading.get_ident()
        if self._owner is None:
            self._owner = thread
        elif self._owner != thread and self._oracle is None:
            raise StreamError(
                f"the virtual device belongs to thread {self._owner}, thread {thread} called it: it is "
                "single-threaded; use device 'threads' for a host with several threads"
            )
        self._advance_to(self.now_ns + duration_ns)

    # How it is done.

    def _advance_to(self, time_ns: int) -> None:
        """Move the host clock, unless it is later already, and call the functions whose start it passes."""
        self.now_ns = max(self.now_ns, time_ns)
        while self._effects and self._effects[0][0] <= self.now_ns:
            self._run(heapq.heappop(self._effects)[2])

    def _run_unasked(self) -> None:
        last_ns = 0
        for head in self._schedule.on_call(self):
            last_ns = max(last_ns, self._place(head))
        self._advance_to(last_ns if self._schedule.host_waits else self.now_ns)

    def _force(self, targets: list[Item]) -> None:
        missing = [item for item in targets if not item.placed]
        if missing:
            for head in self._schedule.on_force(self, tuple(missing)):
                self._place(head)
                while missing and missing[-1].placed:
                    missing.pop()
                if not missing:
                    break
            else:
                raise DeadlockError(self._deadlock(missing[-1]))
        self._advance_to(max((item.end_ns for item in targets), default=0))

    def _place(self, head: Queued) -> int:
        """Take ``head`` off its queue, fix its start and end, and return the end."""
        if not isinstance(head, Item) or head.placed or head.lane.items[0] is not head or not head.runnable:
            raise StreamError(f"schedule {self._schedule.name!r} chose {head}, which cannot run now")
        lane = head.lane
        lane.items.popleft()
        if head.is_wait:
            # Only its own stream and what it waits for: this is the time the fence costs.
            head.start_ns = max(lane.free_ns, head.issue_ns)
            head.end_ns = max(head.start_ns, 0 if head.dependency is None else head.dependency.end_ns)
        else:
            device_free_ns = 0 if self._schedule.overlapped else self._device_free_ns
            head.start_ns = max(lane.free_ns, self.now_ns, device_free_ns)
            head.end_ns = self._device_free_ns = head.start_ns + head.duration_ns
        head.dependency = None
        lane.free_ns = head.end_ns
        head.placed = True
        self._placed += 1
        if head.fn is not None or head.on_begin is not None or head.on_end is not None:
            # Placing order breaks ties of starts: it respects every dependency.
            effect_ns = head.end_ns if head.is_wait else head.start_ns
            heapq.heappush(self._effects, (effect_ns, self._placed, head))
        return head.end_ns

    def _run(self, item: Item) -> None:
        fn, item.fn = item.fn, None
        try:
            try:
                if item.on_begin is not None:
                    item.on_begin()
                if fn is not None:
                    run_launched(fn, item.site)
            finally:
                if item.on_end is not None:
                    item.on_end()
        except Exception as error:  # noqa: BLE001 kept for the next synchronize, as a device would
            self.failures.keep(item.site, error)

    def _deadlock(self, target: Item) -> str:
        parts = []
        for lane in self.lanes:
            if not lane.items:
                continue
            head = lane.items[0]
            if head.runnable:
                parts.append(f"{head} can run, but schedule {self._schedule.name!r} does not run it")
            else:
                parts.append(f"stream {lane.name!r} waits at item {head.seq} for {head.dependency}")
        return f"the host waits for {target}, which can never run: {'; '.join(parts)}"
