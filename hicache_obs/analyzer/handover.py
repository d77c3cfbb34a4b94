"""Order that one host thread hands to another: channels between threads, and blocks of the caching allocator.

After a loss nobody knows which post a receive takes, nor which streams a freed block was marked with: what may have
been handed over then counts as doubtful.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from hicache_obs.analyzer.order import DOUBTFUL_SEQ, Actor, Order, Snapshot
from hicache_obs.records import RecordStream, TensorAlloc, TensorFree, ThreadPost, ThreadRecv

MAX_POSTS: Final = 1 << 14
"""Posts kept that nobody has received yet; receives on the channels that lose theirs are doubtful from then on."""
MAX_BLOCKS: Final = 1 << 16
"""Live tensors, and blocks that were freed with work to wait for; what older ones would order is doubtful."""


class Channels:
    """The n-th post on a channel is ordered before the n-th receive. Fed by the analyzer in trace order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._channels: dict[int, deque[Snapshot]] = {}
        """By channel, what has been posted and not received; in order of each channel's oldest such post."""
        self._waiting = 0
        self._posts: dict[int, dict[Actor, Snapshot]] = {}
        """After a loss: the newest post per channel and thread."""
        self._dropped: dict[Actor, Snapshot] = {}
        """What threads that have posted on forgotten channels, those from ``_low`` to ``_high``, may have told."""
        self._low, self._high = sys.maxsize, -1

    def post(self, record: ThreadPost, seq: int) -> None:
        """A thread hands over what it knows."""
        order, channel = self._order, record.channel
        thread = order.thread(record.thread)
        if self._low <= channel <= self._high:
            self._dropped[thread] = order.note(thread, DOUBTFUL_SEQ)
        elif order.lost_at < 0:
            self._channels.setdefault(channel, deque()).append(order.note(thread, seq))
            self._waiting += 1
            if self._waiting > MAX_POSTS:
                self._forget(list(self._channels))
        else:
            self._posts.setdefault(channel, {})[thread] = order.note(thread, DOUBTFUL_SEQ)
            if len(self._posts) > MAX_POSTS:
                self._forget(list(self._posts))

    def receive(self, record: ThreadRecv) -> None:
        """Follow the matching post. After a loss nobody knows which it is: any of them, perhaps."""
        order, channel = self._order, record.channel
        thread = order.thread(record.thread)
        if self._low <= channel <= self._high:
            for post in self._dropped.values():
                order.join(thread, post)
        elif order.lost_at < 0:
            posts = self._channels.get(channel)
            if posts:
                order.join(thread, posts.popleft())
                self._waiting -= 1
                if not posts:
                    del self._channels[channel]
        else:
            for post in self._posts.get(channel, {}).values():
                order.join(thread, post)

    def _forget(self, channels: list[int]) -> None:
        """Forget the oldest half of ``channels``, and every other whose number is among theirs."""
        oldest = channels[: (len(channels) + 1) // 2]
        self._low, self._high = min(self._low, *oldest), max(self._high, *oldest)
        for channel in channels:
            if self._low <= channel <= self._high:
                posts = self._channels.pop(channel, ())
                self._waiting -= len(posts)
                for thread in {*(post.actor for post in posts), *self._posts.pop(channel, ())}:
                    self._dropped[thread] = self._order.note(thread, DOUBTFUL_SEQ)

    def lose(self) -> None:
        """Records were lost: posts and receives no longer match by count."""
        for channel, posts in self._channels.items():
            known = self._posts.setdefault(channel, {})
            for post in posts:
                known[post.actor] = post.doubted()
        self._channels.clear()


@dataclass(slots=True, eq=False)
class _Tensor:
    """A live tensor: its block, when it was handed out, and the streams marked as using it."""

    block: int
    seq: int
    marked: set[Actor] = field(default_factory=set)


class Blocks:
    """A block is handed out again once the work of marked streams, as of its free, is complete.

    That holds for everybody who gets the block later, too: the allocator has asked once, and the work stays complete.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._tensors: dict[int, _Tensor] = {}
        self._returned: dict[int, dict[Actor, Snapshot]] = {}
        """By block, the work of each stream that it was marked with, as of its last free with that mark."""
        self._strays: list[Snapshot] = []
        """After a loss, and once blocks are forgotten: what any block may have waited for."""

    def hand_out(self, record: TensorAlloc, seq: int) -> None:
        """The thread that gets the block follows the marked streams' work."""
        self._tensors[record.tensor] = _Tensor(record.block, seq)
        if len(self._tensors) > MAX_BLOCKS:
            for tensor in list(islice(self._tensors, MAX_BLOCKS // 2)):
                del self._tensors[tensor]  # its free will be a stray
        thread = self._order.thread(record.thread)
        for snapshot in (*self._returned.get(record.block, {}).values(), *self._strays):
            self._order.join(thread, snapshot)

    def mark(self, record: RecordStream) -> None:
        """A stream uses the tensor."""
        tensor = self._tensors.get(record.tensor)
        if tensor is not None:
            tensor.marked.add(self._order.stream(record.stream))

    def give_back(self, record: TensorFree, seq: int) -> int | None:
        """Returns the tensor's block, ``None`` if its allocation was never seen."""
        tensor = self._tensors.pop(record.tensor, None)
        if tensor is None or tensor.seq < self._order.lost_at:  # its block or its marks may be among the lost
            self._strays = self._order.notes(DOUBTFUL_SEQ)
        if tensor is None:
            return None
        if tensor.marked:
            returned = self._returned[tensor.block] = self._returned.pop(tensor.block, {})  # now the newest
            returned.update((stream, self._order.note(stream, seq)) for stream in tensor.marked)
        if len(self._returned) > MAX_BLOCKS:
            self._strays = self._order.notes(DOUBTFUL_SEQ)
            for block in list(islice(self._returned, MAX_BLOCKS // 2)):
                del self._returned[block]
        return tensor.block
