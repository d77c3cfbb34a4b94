"""Which node a tier gives up next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from hicache_obs.controller.radix_node import Node
from hicache_obs.errors import ConfigError

Rank: TypeAlias = "tuple[int, int]"
"""Lowest goes first."""


def _least_recent(node: Node) -> Rank:
    return (node.last_access, 0)


def _least_used(node: Node) -> Rank:
    return (node.uses, node.last_access)


def _least_important(node: Node) -> Rank:
    return (node.priority, node.last_access)


_RANKS: Final[dict[str, Callable[[Node], Rank]]] = {
    "lru": _least_recent,
    "lfu": _least_used,
    "priority": _least_important,
}
EVICTION_POLICIES: Final = tuple(_RANKS)
"""``lru``: least recently used. ``lfu``: fewest uses, then least recently used. ``priority``: lowest priority of a
request that used it, then least recently used."""


def rank_named(name: str) -> Callable[[Node], Rank]:
    """How policy ``name`` ranks nodes; ConfigError if there is none."""
    rank = _RANKS.get(name)
    if rank is None:
        raise ConfigError(f"host_eviction: {name!r}; expected one of {', '.join(EVICTION_POLICIES)}")
    return rank


class EvictionQueue:
    """Candidates for one tier's eviction, lowest rank first, in O(log n).

    A heap of ``(rank, node_id, node)`` with at most one entry per node. An entry may be out of date: the node was
    used since, or is no candidate any more. Looking again when it surfaces keeps matching and locking free of heap
    work; a use only ever raises a rank, so the order is exact all the same.
    """

    def __init__(self, is_candidate: Callable[[Node], bool], rank: Callable[[Node], Rank]) -> None:
        self._is_candidate = is_candidate
        self._rank = rank
        self._heap: list[tuple[Rank, int, Node]] = []
        self._queued: set[Node] = set()

    def offer(self, node: Node) -> None:
        """Queue ``node`` if it is a candidate. To be called whenever it may have become one."""
        if node not in self._queued and self._is_candidate(node):
            self._queued.add(node)
            heapq.heappush(self._heap, (self._rank(node), node.node_id, node))

    def pop(self) -> Node | None:
        """The candidate that goes first, taken off the queue."""
        while self._heap:
            rank, _node_id, node = self._heap[0]
            if self._is_candidate(node) and rank != self._rank(node):
                heapq.heapreplace(self._heap, (self._rank(node), node.node_id, node))
                continue
            heapq.heappop(self._heap)
            self._queued.remove(node)
            if self._is_candidate(node):
                return node
        return None

    def clear(self) -> None:
        """Forget every candidate."""
        self._heap.clear()
        self._queued.clear()

    def check_complete(self, nodes: Iterable[Node]) -> None:
        """AssertionError unless each candidate among ``nodes`` is queued, and nobody twice."""
        assert {node for _rank, _id, node in self._heap} == self._queued, "the queue and its index differ"
        assert len(self._heap) == len(self._queued), "a node is queued twice for eviction"
        for node in nodes:
            assert node in self._queued or not self._is_candidate(node), f"{node!r}: evictable, but not queued"
