"""An independent judge for small histories: an explicit graph of everything that must happen before, and search.

It shares no code with the analyzer. Nodes are steps; an edge means "complete before the other begins". A record
of the current event is looked up by scanning the history, not by keeping clocks.
"""

from __future__ import annotations

from hicache_obs.records import (
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    HostSync,
    Kernel,
    Memcpy,
    Mode,
    Record,
    WaitStream,
)


def races(records: list[Record], *, polled: bool) -> set[tuple[int, int]]:
    """Pairs of conflicting operations that nothing orders. ``polled``: whether a true query counts as an edge."""
    steps = [r for r in records if r.op >= 0]
    before: dict[int, set[int]] = {r.op: set() for r in steps}
    last_on: dict[int, int] = {}  # stream -> newest item on it
    waits: dict[int, set[int]] = {}  # stream -> items its next item must follow
    host: set[int] = set()  # items the host knows to be complete
    recorded: dict[int, int] = {}  # event -> its current record

    def enqueue(item: int, stream: int) -> None:
        before[item] |= host | waits.pop(stream, set())
        if stream in last_on:
            before[item].add(last_on[stream])
        last_on[stream] = item

    for step in steps:
        if isinstance(step, Kernel | Memcpy):
            enqueue(step.op, step.stream)
        elif isinstance(step, EventRecord):
            enqueue(step.op, step.stream)
            recorded[step.event] = step.op
        elif isinstance(step, EventWait):
            if step.event in recorded:
                waits.setdefault(step.stream, set()).add(recorded[step.event])
        elif isinstance(step, WaitStream):
            enqueue(step.op, step.on)
            waits.setdefault(step.waiter, set()).add(step.op)
        elif isinstance(step, EventSync) or (isinstance(step, EventQuery) and step.result and polled):
            if step.event in recorded:
                host.add(recorded[step.event])
        elif isinstance(step, HostSync):
            streams = [step.stream] if step.stream is not None else list({*last_on, *waits})
            for stream in streams:
                host |= {last_on[stream]} if stream in last_on else set()
                host |= waits.get(stream, set())

    def reaches(late: int, early: int) -> bool:
        todo, seen = [late], set()
        while todo:
            item = todo.pop()
            if item == early:
                return True
            if item not in seen:
                seen.add(item)
                todo.extend(before[item])
        return False

    operations = [r for r in steps if isinstance(r, Kernel | Memcpy)]
    return {
        (a.op, b.op)
        for index, a in enumerate(operations)
        for b in operations[index + 1 :]
        if _conflict(a, b) and not reaches(b.op, a.op)
    }


def _conflict(a: Kernel | Memcpy, b: Kernel | Memcpy) -> bool:
    if not (a.layers[0] < b.layers[1] and b.layers[0] < a.layers[1]):
        return False
    return any(
        x.space is y.space
        and (x.mode is Mode.WRITE or y.mode is Mode.WRITE)
        and set(x.ids.tolist()) & set(y.ids.tolist())
        for x in a.accesses
        for y in b.accesses
    )
