"""Rounds of a made-up rank whose every field follows from a number: what was written can be told from what was not.

A round is a forward kernel, a fence, a load-back onto its pages, their device times and a synchronize of the host. At
known places the fence is missing and the times overlap: a race. Operation ids say which process of a rank made them.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hicache_obs.records import (
    NO_OP,
    AnyRecord,
    Define,
    DefineSpace,
    Direction,
    HostSync,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    Purpose,
    StreamId,
    ThreadId,
    Times,
    WaitStream,
    device,
)

OPS: Final = 8
"""Operation ids of a round; not all are used."""
_COPY, _WAIT = 2, 1
_LIFE_BITS: Final = 40
RACY_SITES: Final = 64
LAYERS: Final = 8
_PAGES, _SETS = 4, 256
_MAIN: Final = ThreadId(0)
_FORWARD, _LOAD = StreamId(1), StreamId(2)
_PAGE_SETS: Final = tuple(np.arange(_PAGES * n, _PAGES * n + _PAGES) for n in range(_SETS))
_ACCESSES: Final = tuple((device(Mode.WRITE, pages),) for pages in _PAGE_SETS)
_FORWARD_SITE, _LOAD_SITE, _FIRST_RACY_SITE = 1, 2, 3
_KERNEL_NS, _COPY_NS = 50_000, 20_000


def is_racy(number: int, every: int) -> bool:
    """Whether round ``number`` lacks its fence: the last of each ``every``, none for 0."""
    return every > 0 and number % every == every - 1


def names() -> list[AnyRecord]:
    """The definitions of a rank's streams, pool and sites."""
    sites = {_FORWARD_SITE: "stress: forward", _LOAD_SITE: "stress: load"}
    sites |= {_FIRST_RACY_SITE + n: f"stress: load without a fence, place {n}" for n in range(RACY_SITES)}
    return [
        *(Define(NO_OP, _MAIN, 0, DefineSpace.STREAM, s, name) for s, name in ((_FORWARD, "forward"), (_LOAD, "load"))),
        Define(NO_OP, _MAIN, 0, DefineSpace.POOL, 0, "kv", LAYERS),
        *(Define(NO_OP, _MAIN, 0, DefineSpace.SITE, site, name) for site, name in sites.items()),
    ]


def round_records(life: int, number: int, now_ns: int, *, racy: bool) -> list[AnyRecord]:
    """Round ``number`` of the ``life``-th process of a rank."""
    op, accesses = first_op(life, number), _ACCESSES[number % _SETS]
    copy, site = OpId(op + _COPY), _LOAD_SITE
    start_ns = now_ns + 1000
    copied_ns = start_ns + _KERNEL_NS + 1000
    if racy:
        site, copied_ns = _FIRST_RACY_SITE + number % RACY_SITES, start_ns + 1000
    fence = [WaitStream(OpId(op + _WAIT), _MAIN, now_ns, _LOAD, _FORWARD, Purpose.LOAD_FENCE)]
    return [
        Kernel(op, _MAIN, now_ns, _FORWARD, _FORWARD_SITE, number, _size(op), (0, LAYERS), accesses),
        *([] if racy else fence),
        Memcpy(copy, _MAIN, now_ns, _LOAD, site, number, _size(copy), (0, LAYERS), accesses, Direction.HOST_TO_DEVICE),
        Times(op, _MAIN, now_ns, start_ns, start_ns + _KERNEL_NS),
        Times(copy, _MAIN, now_ns, copied_ns, copied_ns + _COPY_NS),
        HostSync(OpId(op + OPS - 1), _MAIN, now_ns, None),
    ]


def first_op(life: int, number: int) -> OpId:
    """Of a round; its forward kernel."""
    return OpId((life << _LIFE_BITS) + OPS * number)


def racing_pair(life: int, number: int) -> tuple[OpId, OpId]:
    """The two operations of a round that race where it is racy."""
    op = first_op(life, number)
    return op, OpId(op + _COPY)


def round_of(op: OpId) -> tuple[int, int]:
    """Life and number of the round that ``op`` belongs to."""
    return op >> _LIFE_BITS, (op & (1 << _LIFE_BITS) - 1) // OPS


def fault(record: AnyRecord) -> str:
    """What in a record is not as it was written; empty if nothing. Names and losses are not looked at."""
    number = round_of(record.op)[1]
    if isinstance(record, Kernel | Memcpy):
        wanted = _PAGE_SETS[number % _SETS].tolist()
        found = [access.ids.tolist() for access in record.accesses]
        if found != [wanted] or record.group != number or record.size_bytes != _size(record.op):
            return f"{record}: pages {found} of {[wanted]}"
    elif isinstance(record, Times):
        wanted_ns = _KERNEL_NS if record.op % OPS == 0 else _COPY_NS
        if record.end_ns - record.start_ns != wanted_ns:
            return f"{record}: it takes {wanted_ns} ns"
    elif isinstance(record, WaitStream):
        if (record.waiter, record.on, record.op % OPS) != (_LOAD, _FORWARD, _WAIT):
            return str(record)
    elif isinstance(record, HostSync) and (record.stream is not None or record.op % OPS != OPS - 1):
        return str(record)
    return ""


def _size(op: OpId) -> int:
    return int(op) * 2654435761 % (1 << 31)
