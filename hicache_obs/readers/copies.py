"""``copy_pairs``: what must be ordered in a profile without page sets, so that no pair of pages can race.

For every copy between host and device, and every stream of that device: the last operation issued before the copy,
and the first one issued after it. A stream runs in order, so if these are ordered with the copy then all its work is,
and with it every pair of real pages. A lack of order implies nothing: the two may touch different pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hicache_obs.readers.profile import OpKind, Profile
from hicache_obs.readers.profile_records import Issued
from hicache_obs.records import OpId

CopyPairs = Mapping[OpId, tuple[OpId, ...]]
"""By the later operation: the earlier ones."""
COPIES: Final = (OpKind.HOST_TO_DEVICE, OpKind.DEVICE_TO_HOST)


def copy_pairs(profile: Profile, process: int) -> CopyPairs:
    """All such pairs of one process; ids as in ``profile_trace``."""
    ops = profile.ops
    kinds, streams = ops.kind.tolist(), ops.stream.tolist()
    devices = [(stream.process, stream.device) for stream in profile.streams]
    on_device: dict[tuple[int, int], list[int]] = {}
    for number, device in enumerate(devices):
        on_device.setdefault(device, []).append(number)
    issued = Issued(profile, process)
    last: dict[int, int] = {}
    waiting: dict[int, list[int]] = {}
    found: dict[OpId, tuple[OpId, ...]] = {}
    for first in issued.operations():
        rows = issued.replays[first]
        touching = [row for row in rows if kinds[row] != OpKind.OTHER_COPY]
        if not touching:
            continue
        partners: set[int] = set()
        own = {streams[row] for row in touching}
        for stream in own:
            partners.update(waiting.pop(stream, ()))
        if any(kinds[row] in COPIES for row in touching):
            neighbours = [s for stream in own for s in on_device[devices[stream]]]
            partners.update(last[stream] for stream in neighbours if stream in last)
            for stream in neighbours:
                waiting.setdefault(stream, []).append(first)
        partners.discard(first)
        if partners:
            found[OpId(first)] = tuple(OpId(row) for row in sorted(partners))
        for stream in own:
            last[stream] = first
    return found
