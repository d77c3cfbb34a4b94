"""Order that one host thread hands to another: channels between threads, and blocks of the caching allocator.

After a loss nobody knows which post a receive takes, nor which streams a freed block was marked with: what may have
been handed over then counts as doubtful.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hicache_obs.analyzer.order import DOUBTFUL_SEQ, Actor, Order, Snapshot
from hicache_obs.records import RecordStream, TensorAlloc, TensorFree, ThreadPost, ThreadRecv



class Channels:
    """The n-th post on a channel is ordered before the n-th receive. Fed by the analyzer in trace order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._channels: dict[int, deque[Snapshot]] = {}
        self._posts: dict[tuple[int, Actor], Snapshot] = {}
        """After a loss: the newest post per channel and thread."""

    def post(self, record: ThreadPost, seq: int) -> None:
        """A thread hands over what it knows."""
        order = self._order
        thread = order.thread(record.thread)
        if order.lost_at < 0:
            self._channels.setdefault(record.channel, deque()).append(order.note(thread, seq))
        else:
            self._posts[record.channel, thread] = order.note(thread, DOUBTFUL_SEQ)

    def receive(self, record: ThreadRecv) -> None:
        """Follow the matching post. After a loss nobody knows which it is: any of them, perhaps."""
        order = self._order
        thread = order.thread(record.thread)
        if order.lost_at < 0:
            posts = self._channels.get(record.channel)
            if posts:
                order.join(thread, posts.popleft())
            return
        for (channel, _), post in self._posts.items():
            if channel == record.channel:
                order.join(thread, post)

    def lose(self) -> None:
        """Records were lost: posts and receives no longer match by count."""
        for channel, posts in self._channels.items():
            for post in posts:
                self._posts[channel, post.actor] = post.doubted()
        self._channels.clear()


@dataclass(slots=True, eq=False)
class _Tensor:
    """A live tensor: its block, when it was handed out, and the streams marked as using it."""

    block: int
    seq: int
    marked: set[Actor] = field(default_factory=set)


class Blocks:
    """A block is handed out again once the work of marked streams, as of its free, is complete."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._tensors: dict[int, _Tensor] = {}
        self._returned: dict[int, list[Snapshot]] = {}
        self._strays: list[Snapshot] = []
        """After a loss: what any block may have waited for."""

    def hand_out(self, record: TensorAlloc, seq: int) -> None:
        """The thread that gets the block follows the marked streams' work."""
        self._tensors[record.tensor] = _Tensor(record.block, seq)
        thread = self._order.thread(record.thread)
        for snapshot in (*self._returned.pop(record.block, ()), *self._strays):
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
        self._returned[tensor.block] = [self._order.note(stream, seq) for stream in tensor.marked]
        return tensor.block
