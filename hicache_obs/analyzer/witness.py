"""Two legal schedules that prove a race: one in which the accesses overlap, one in which they run in reverse.

Nothing orders the two, so what both need can be complete before either begins. From there both may be in flight
together, or the later one may run first. Items that neither needs are left out: what remains cannot be shortened.
Pure. Records that were lost may hold the missing edge; a schedule can only respect the edges that are there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hicache_obs.analyzer.graph import Graph, Item
from hicache_obs.errors import InputError
from hicache_obs.records import Mode, OpId, Record, Space

MAX_RECORDS: Final = 1_000_000
"""The explicit graph costs about 350 bytes and 8 µs per record."""
SHOWN_SLOTS: Final = 12
"""Last slots of a schedule that its table shows."""
MAX_COLUMNS: Final = 6
"""Actors a table has columns for; with more, each row names its actor."""


class Moment(str, enum.Enum):
    """A step begins or ends an item."""

    BEGIN = "begin"
    END = "end"


@dataclass(frozen=True, slots=True)
class Step:
    """One item begins or ends. Steps of one slot may happen at the same time; a schedule lists them in an order.

    Attributes:
        slot: Time, from 1.
        item: Index of the item in the graph.
        op: Operation id of the item.
        actor: Name of what runs it.
        moment: Begin or end.
    """

    slot: int
    item: int
    op: OpId
    actor: str
    moment: Moment


Schedule = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A page or buffer both accesses touch, and how.

    Attributes:
        space, pool, page: As in ``Access``.
        earlier, later: Modes of the two; an operation that does both counts as writing.
    """

    space: Space
    pool: int
    page: int
    earlier: Mode
    later: Mode


@dataclass(frozen=True, slots=True)
class Witness:
    """Proof that nothing orders two accesses.

    Attributes:
        earlier, later: The two items, in issue order.
        cells: What they conflict on, ascending.
        layer: First layer they share.
        items: Everything the two need and the two, in issue order.
        overlap: All that both need is complete, then both are in flight together.
        reverse: All that both need is complete, then the later one runs, then the earlier one.
    """

    earlier: Item
    later: Item
    cells: tuple[Cell, ...]
    layer: int
    items: tuple[Item, ...]
    overlap: Schedule
    reverse: Schedule


def witness(records: Iterable[Record], earlier_op: OpId, later_op: OpId) -> Witness:
    """Both schedules for the first unordered conflicting accesses of two operations; their order does not matter.

    Args:
        records: A finite trace, in issue order.
        earlier_op, later_op: Operation ids; a graph replay's stands for all its entries.

    Raises:
        InputError: An operation is not in the trace or touches nothing, or the two are ordered or do not conflict.
    """
    graph = Graph(_bounded(records))
    sides = []
    for op in (earlier_op, later_op):
        sides.append(graph.of(op))
        if not sides[-1]:
            raise InputError(f"op {op}: must be an operation of the trace that touches pages or buffers")
    pairs = [(min(a, b, key=_index), max(a, b, key=_index)) for a in sides[0] for b in sides[1] if a.step != b.step]
    conflicts = [(a, b) for a, b in pairs if shared(a, b)]
    if not conflicts:
        raise InputError(
            f"ops {earlier_op} and {later_op}: must touch a common page or buffer, at least one writing it"
        )
    for a, b in conflicts:
        needed = graph.needs(b.index)
        if a.index not in needed:
            needed |= graph.needs(a.index)
            return _make(a, b, tuple(graph.items[index] for index in sorted(needed)))
    raise InputError(f"ops {earlier_op} and {later_op} are ordered: no schedule lets them overlap or run in reverse")


def shared(a: Item, b: Item) -> tuple[Cell, ...]:
    """What two items conflict on: same place, a common layer, and at least one of them writes."""
    if max(a.layers[0], b.layers[0]) >= min(a.layers[1], b.layers[1]):
        return ()
    first, second = _modes(a), _modes(b)
    return tuple(
        Cell(*place, first[place], second[place])
        for place in sorted(first.keys() & second.keys())
        if Mode.WRITE in (first[place], second[place])
    )


def fault(items: Iterable[Item], schedule: Sequence[Step]) -> str:
    """Why ``schedule`` is not a legal run of exactly ``items``; empty if it is one."""
    known = {item.index: item for item in items}
    begun: set[int] = set()
    ended: set[int] = set()
    slot = 0
    for step in schedule:
        item = known.get(step.item)
        what = f"slot {step.slot}: op {step.op} on {step.actor}"
        if item is None:
            return f"{what} is not among the items"
        if step.slot < slot:
            return f"{what} comes after slot {slot}"
        slot = step.slot
        if step.moment is Moment.END:
            if step.item not in begun - ended:
                return f"{what} ends but is not running"
            ended.add(step.item)
            continue
        if step.item in begun:
            return f"{what} begins twice"
        missing = [index for index in item.before if index not in ended]
        if missing:
            first = known.get(missing[0])
            name = "an item that is left out" if first is None else f"op {first.op} on {first.actor}"
            return f"{what} begins before {name} is complete"
        begun.add(step.item)
    unfinished = sorted(known.keys() - ended)
    return f"op {known[unfinished[0]].op} on {known[unfinished[0]].actor} never ends" if unfinished else ""


def table(found: Witness, label: Callable[[OpId], str] | None = None) -> str:
    """Both schedules as text: one row per slot, one column per actor. ``label`` names operations."""
    name = label or (lambda op: f"op {op}")
    first, second = name(found.earlier.op), name(found.later.op)
    return "\n".join(
        (
            f"overlap: {first} and {second} in flight together",
            *_rows(found, found.overlap, name),
            "",
            f"reverse: {second} is complete before {first} begins",
            *_rows(found, found.reverse, name),
        )
    )


def _bounded(records: Iterable[Record]) -> Iterable[Record]:
    for count, record in enumerate(records):
        if count == MAX_RECORDS:
            raise InputError(f"a witness needs the whole history as a graph: must be {MAX_RECORDS} records at most")
        yield record


def _index(item: Item) -> int:
    return item.index


def _modes(item: Item) -> dict[tuple[Space, int, int], Mode]:
    modes: dict[tuple[Space, int, int], Mode] = {}
    for access in item.accesses:
        for page in access.ids.tolist():
            place = (access.space, access.pool, page)
            modes[place] = max(access.mode, modes.get(place, Mode.READ))
    return modes


def _make(a: Item, b: Item, items: tuple[Item, ...]) -> Witness:
    prefix: list[Step] = []
    slots: dict[int, int] = {}
    for item in items:
        if item is not a and item is not b:
            slots[item.index] = 1 + max((slots[index] for index in item.before), default=0)
            prefix += (_step(slots[item.index], item, moment) for moment in Moment)
    prefix.sort(key=lambda step: step.slot)  # stable: an item's end stays behind its beginning
    slot = 1 + max(slots.values(), default=0)
    begin, end = Moment.BEGIN, Moment.END
    # The later one ends first: the earlier one then has the last word on half of what it writes.
    overlap = (_step(slot, a, begin), _step(slot, b, begin), _step(slot + 1, b, end), _step(slot + 1, a, end))
    reverse = (_step(slot, b, begin), _step(slot, b, end), _step(slot + 1, a, begin), _step(slot + 1, a, end))
    layer = max(a.layers[0], b.layers[0])
    return Witness(a, b, shared(a, b), layer, items, (*prefix, *overlap), (*prefix, *reverse))


def _step(slot: int, item: Item, moment: Moment) -> Step:
    return Step(slot, item.index, item.op, item.actor, moment)


def _rows(found: Witness, schedule: Schedule, name: Callable[[OpId], str]) -> list[str]:
    """Lines of one table, its oldest slots left out if there are many."""
    items = {item.index: item for item in found.items}
    last = schedule[-1].slot
    texts: dict[tuple[int, int], list[Moment]] = {}
    for step in schedule:
        if step.slot > last - SHOWN_SLOTS:
            texts.setdefault((step.slot, step.item), []).append(step.moment)
    lanes = list(dict.fromkeys(items[index].lane for _, index in sorted(texts, key=lambda key: key[1])))
    column = {lane: position for position, lane in enumerate(lanes)}
    wide = len(lanes) <= MAX_COLUMNS
    actors = {item.lane: item.actor for item in found.items}
    rows = [["slot", *(actors[lane] for lane in lanes)] if wide else ["slot", "actor", "what"]]
    for (slot, index), moments in texts.items():
        item = items[index]
        verb = item.verb if len(moments) == 2 else f"{moments[0].value}s"
        text = f"{name(item.op)} {verb}"
        if not wide:
            rows.append([str(slot), item.actor, text])
            continue
        if rows[-1][0] != str(slot):
            rows.append([str(slot), *("" for _ in lanes)])
        rows[-1][1 + column[item.lane]] = text
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if last > SHOWN_SLOTS:
        lines.insert(1, f"  ({last - SHOWN_SLOTS} earlier slots run what these need)")
    return lines
