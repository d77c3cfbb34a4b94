"""``copy_pairs``: what must be ordered in a profile without page sets, so that no pair of pages can race.

For every copy between host and device, and every stream of that device: the last operation issued before the copy,
and the first one issued after it. A stream runs in order, so if these are ordered with the copy then all its work is,
and with it every pair of real pages. A lack of order implies nothing: the two may touch different pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hicache_obs.readers.profile import UNKNOWN, OpKind, Profile, StreamInfo
from hicache_obs.readers.profile_records import Issued
from hicache_obs.records import OpId

CopyPairs = Mapping[OpId, tuple[OpId, ...]]
"""By the later operation: the earlier ones."""
COPIES: Final = (OpKind.HOST_TO_DEVICE, OpKind.DEVICE_TO_HOST)


def copy_pairs(profile: Profile, process: int) -> CopyPairs:
    """All such pairs of one process; ids as in ``profile_trace``."""
    ops = profile.ops
    kinds, streams = ops.kind.tolist(), ops.stream.tolist()
    beside = _Beside(profile.streams)
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
            neighbours = [s for stream in own for s in beside[stream]]
            partners.update(last[stream] for stream in neighbours if stream in last)
            for stream in neighbours:
                waiting.setdefault(stream, []).append(first)
        partners.discard(first)
        if partners:
            found[OpId(first)] = tuple(OpId(row) for row in sorted(partners))
        for stream in own:
            last[stream] = first
    return found


class _Beside:
    """Streams of the same device as another; one whose device is not known may be of any."""

    def __init__(self, streams: Sequence[StreamInfo]) -> None:
        self._streams = streams
        self._of_process: dict[int, list[int]] = {}
        self._of_device: dict[tuple[int, int], list[int]] = {}
        for number, stream in enumerate(streams):
            self._of_process.setdefault(stream.process, []).append(number)
            self._of_device.setdefault((stream.process, max(stream.device, UNKNOWN)), []).append(number)

    def __getitem__(self, number: int) -> list[int]:
        stream = self._streams[number]
        if stream.device < 0:
            return self._of_process[stream.process]
        unknown = self._of_device.get((stream.process, UNKNOWN), [])
        return self._of_device[stream.process, stream.device] + unknown
