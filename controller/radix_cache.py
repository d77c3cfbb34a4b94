"""Which prompt prefixes are cached, on which tier, and what may be evicted.

A radix tree over page-aligned token sequences. A node's contents are on the device, in host memory, or on both.
Two rules keep every cached prefix reachable from the root, and checks refuse what would break them:

* a node on the device hangs below a node on the device (or the root);
* a node in host memory hangs below a node in host memory (or the root): back up parents first.

The tree is bookkeeping of the scheduler's thread, the only one that may use it. It moves no data and orders
nothing: a page returned by ``evict_device`` may still be read or written by launched work.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache_obs.errors import ControllerError, PagePinned
from hicache_obs.records import PageIds

Int64Array = npt.NDArray[np.int64]

_EMPTY: Final[Int64Array] = np.empty(0, dtype=np.int64)


class _Pin:
    """One transfer's hold on a node. A split shares it between both parts, so it ends for both at once."""

    __slots__ = ("active", "node")

    def __init__(self, node: Node) -> None:
        self.active = True
        self.node = node


class Node:
    """A run of whole pages of tokens below its parent's. Changed by ``RadixCache`` only, but for the two pins.

    Attributes:
        node_id: Creation order.
        tokens: ``(p * page_size,) int64``.
        device_pages, host_pages: ``(p,) int64`` page ids, or ``None`` when not on that tier. Never written to:
            a change replaces the array, so a transfer may keep the one it was submitted with.
        tenancies: ``(p,) int64`` ledger tenancies of the device pages; empty when not on the device.
        sources: ``(p,) int64`` tenancies that produced the contents a reader of this node gets: those on the
            device, else those in host memory.
        parent: ``None`` for the root and for a node that left the tree.
        children: By the bytes of their first page of tokens.
        lock_ref: Requests that use this node or one below it. Locked nodes are not evicted from any tier.
        last_access: Value of the tree's access counter when last matched or inserted. Not a clock.
    """

    __slots__ = (
        "_backing_up",
        "_cache",
        "_device_children",
        "_holds",
        "_host_sources",
        "_loading",
        "children",
        "device_pages",
        "host_pages",
        "last_access",
        "lock_ref",
        "node_id",
        "parent",
        "sources",
        "tenancies",
        "tokens",
    )

    def __init__(self, cache: RadixCache, parent: Node | None, tokens: Int64Array) -> None:
        self._cache = cache
        self.node_id = cache._next_id()
        self.parent = parent
        self.tokens = tokens
        self.children: dict[bytes, Node] = {}
        self.device_pages: PageIds | None = None
        self.host_pages: PageIds | None = None
        self.tenancies: Int64Array = _EMPTY
        self.sources: Int64Array = _EMPTY
        self.lock_ref = 0
        self.last_access = 0
        self._host_sources: Int64Array = _EMPTY
        self._holds = 0  # locks and pins of this node and of all below it
        self._device_children = 0
        self._loading: _Pin | None = None
        self._backing_up: _Pin | None = None

    def __repr__(self) -> str:
        tiers = [
            name for name, pages in (("device", self.device_pages), ("host", self.host_pages)) if pages is not None
        ]
        return f"<Node {self.node_id}: {len(self.tokens)} tokens on {' and '.join(tiers) or 'no tier'}>"

    @property
    def loading(self) -> bool:
        """Whether an in-flight load-back writes the device pages.

        Set it after ``attach_device``, clear it when the copy is known to be complete. PagePinned when set twice.
        Like a lock, it protects the node and its ancestors from eviction.
        """
        return self._loading is not None and self._loading.active

    @loading.setter
    def loading(self, pinned: bool) -> None:
        self._loading = self._cache._pin(self, self._loading, pinned, "load-back")

    @property
    def backing_up(self) -> bool:
        """Whether an in-flight write-back reads the device pages and writes the host pages.

        Set it after ``attach_host``; otherwise as ``loading``.
        """
        return self._backing_up is not None and self._backing_up.active

    @backing_up.setter
    def backing_up(self, pinned: bool) -> None:
        self._backing_up = self._cache._pin(self, self._backing_up, pinned, "write-back")


class _EvictionQueue:
    """Candidates for one tier's eviction, least recently used first, in O(log n).

    A heap of ``(last_access, node_id, node)`` with at most one entry per node. An entry may be out of date: the
    node was used since, or is no candidate any more. Looking again when it surfaces keeps matching and locking
    free of heap work; a use only ever raises ``last_access``, so the order is exactly LRU all the same.
    """

    def __init__(self, is_candidate: Callable[[Node], bool]) -> None:
        self._is_candidate = is_candidate
        self._heap: list[tuple[int, int, Node]] = []
        self._queued: set[Node] = set()

    def offer(self, node: Node) -> None:
        """Queue ``node`` if it is a candidate. To be called whenever it may have become one."""
        if node not in self._queued and self._is_candidate(node):
            self._queued.add(node)
            heapq.heappush(self._heap, (node.last_access, node.node_id, node))

    def pop(self) -> Node | None:
        """Least recently used candidate, taken off the queue."""
        while self._heap:
            access, _node_id, node = self._heap[0]
            if self._is_candidate(node) and access != node.last_access:
                heapq.heapreplace(self._heap, (node.last_access, node.node_id, node))
                continue
            heapq.heappop(self._heap)
            self._queued.remove(node)
            if self._is_candidate(node):
                return node
        return None

    def check_complete(self, nodes: Iterable[Node]) -> None:
        """AssertionError unless each candidate among ``nodes`` is queued, and nobody twice."""
        assert {node for _access, _id, node in self._heap} == self._queued, "the queue and its index differ"
        assert len(self._heap) == len(self._queued), "a node is queued twice for eviction"
        for node in nodes:
            assert node in self._queued or not self._is_candidate(node), f"{node!r}: evictable, but not queued"


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """What is cached of a token sequence.

    Attributes:
        device_nodes: Leading nodes with device pages. One that is ``loading`` holds its contents only once the
            load-back is complete.
        host_nodes: The nodes after them, with host pages only.
        device_len, host_len: Their lengths in tokens.
        last_node: Deepest of all (the root when nothing matched); what a request locks.
    """

    device_nodes: tuple[Node, ...]
    host_nodes: tuple[Node, ...]
    device_len: int
    host_len: int
    last_node: Node

    def device_pages(self) -> PageIds:
        """``(device_len / page_size,) int64``."""
        return _joined([node.device_pages for node in self.device_nodes if node.device_pages is not None])

    def host_pages(self) -> PageIds:
        """``(host_len / page_size,) int64``."""
        return _joined([node.host_pages for node in self.host_nodes if node.host_pages is not None])

    def tenancies(self) -> Int64Array:
        """Of ``device_pages``."""
        return _joined([node.tenancies for node in self.device_nodes])

    def sources(self) -> Int64Array:
        """Of ``device_pages``."""
        return _joined([node.sources for node in self.device_nodes])


@dataclass(frozen=True, slots=True, eq=False)
class InsertResult:
    """What ``insert`` did with the caller's pages.

    Attributes:
        new_nodes: Nodes that were created; at most one.
        rematerialised: Host-only nodes that took over the caller's pages.
        duplicate_pages: The caller's pages whose contents the device has elsewhere; the caller frees them.
        last_node: Deepest node of the inserted sequence.
    """

    new_nodes: tuple[Node, ...]
    rematerialised: tuple[Node, ...]
    duplicate_pages: PageIds
    last_node: Node


@dataclass(frozen=True, slots=True, eq=False)
class DeviceEviction:
    """What ``evict_device`` took off the device.

    Attributes:
        pages: Device pages nobody owns now; the caller frees them.
        nodes: The nodes they belonged to, in eviction order. Those without host pages have left the tree.
    """

    pages: PageIds
    nodes: tuple[Node, ...]


class RadixCache:
    """Prefix cache over both tiers.

    Splitting. A partial match splits a node at a page boundary, also while a transfer holds it. That is safe
    because the node object stays the *lower* part: locks and pins taken on it are released along the same chain
    of ancestors, which now includes the new upper part; the upper part starts with the same counts and shares
    the pins, so both parts are released together; and transfers work on the page arrays they were submitted
    with, which a split never changes. Refusing to split would be safe too, but every request that shares less
    than the whole of a node being written back (a system prompt, say) would recompute it.

    Attributes:
        page_size: Tokens per page; keys are multiples of it.
        root: Node of no tokens, on both tiers, never evicted.
    """

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ControllerError(f"page_size: {page_size}; expected an integer ≥ 1")
        self.page_size = page_size
        self._ids = 0
        self._tick = 0
        self._device_total = self._host_total = 0
        self._device_evictable = self._host_evictable = 0
        self._device_queue = _EvictionQueue(_is_device_candidate)
        self._host_queue = _EvictionQueue(_is_host_candidate)
        self.root = Node(self, None, _EMPTY)
        self.root.device_pages = self.root.host_pages = _EMPTY

    @property
    def device_pages_total(self) -> int:
        """Device pages the tree owns."""
        return self._device_total

    @property
    def host_pages_total(self) -> int:
        """Host pages the tree owns."""
        return self._host_total

    @property
    def device_evictable_pages(self) -> int:
        """What ``evict_device`` could free now."""
        return self._device_evictable

    @property
    def host_evictable_pages(self) -> int:
        """What ``evict_host`` could free now."""
        return self._host_evictable

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def match(self, tokens: Int64Array) -> Match:
        """Longest cached prefix of ``tokens``, ``(n,) int64``, in whole pages; counts as a use of its nodes."""
        tokens = self._whole_pages(tokens)
        path = list(self._walk(tokens))
        split = next((i for i, node in enumerate(path) if node.device_pages is None), len(path))
        device_len = sum(len(node.tokens) for node in path[:split])
        host_len = sum(len(node.tokens) for node in path[split:])
        last_node = path[-1] if path else self.root
        return Match(tuple(path[:split]), tuple(path[split:]), device_len, host_len, last_node)

    def insert(self, tokens: Int64Array, pages: PageIds, tenancies: Int64Array, sources: Int64Array) -> InsertResult:
        """Hand the device pages of a sequence to the tree.

        Args:
            tokens: ``(n * page_size,) int64`` from the start of the sequence.
            pages: ``(n,) int64`` device pages that hold them. Those the tree already owns at the same place (the
                caller's matched prefix) stay the tree's.
            tenancies, sources: ``(n,) int64``, of ``pages``.

        Returns:
            The pages left to the caller, and the nodes touched. A caller that goes on with the sequence must
            use the tree's pages instead of the duplicates; where such a node is ``loading``, after its load-back.

        Raises:
            ControllerError: The lengths do not belong together.
        """
        count = len(pages)
        if len(tokens) != count * self.page_size or len(tenancies) != count or len(sources) != count:
            raise ControllerError(
                f"insert: {len(tokens)} tokens, {count} pages, {len(tenancies)} tenancies and {len(sources)} "
                f"sources; expected {self.page_size} tokens, one tenancy and one source per page"
            )
        tokens, pages = self._whole_pages(tokens), pages.copy()
        tenancies, sources = tenancies.copy(), sources.copy()
        duplicates: list[PageIds] = []
        rematerialised: list[Node] = []
        done, last_node = 0, self.root
        for node in self._walk(tokens):
            part = slice(done, done + self._pages_of(node))
            if node.device_pages is None:
                self._put_on_device(node, pages[part], tenancies[part], sources[part])
                rematerialised.append(node)
            else:
                duplicates.append(pages[part][pages[part] != node.device_pages])
            done, last_node = part.stop, node
        new_nodes: tuple[Node, ...] = ()
        if done < count:
            node = Node(self, last_node, tokens[done * self.page_size :].copy())
            node.last_access = self._tick
            last_node.children[self._key(node.tokens)] = node
            self._put_on_device(node, pages[done:], tenancies[done:], sources[done:])
            new_nodes, last_node = (node,), node
        return InsertResult(new_nodes, tuple(rematerialised), _joined(duplicates), last_node)

    def lock(self, node: Node) -> None:
        """Protect ``node`` and its ancestors from eviction; partner of ``unlock``. Locks count."""
        self._in_tree(node, "lock")
        for step in _up(node):
            step.lock_ref += 1
            self._hold(step)

    def unlock(self, node: Node) -> None:
        """Undo one ``lock`` of ``node``."""
        self._in_tree(node, "unlock")
        if node.lock_ref < 1 and node is not self.root:
            raise ControllerError(f"unlock: {node!r} is not locked")
        for step in _up(node):
            step.lock_ref -= 1
            self._release(step)

    def evict_device(self, n_pages: int) -> DeviceEviction:
        """Give up at least ``n_pages`` device pages, least recently used nodes first, whole nodes at a time.

        Takes nodes that are not protected by a lock or a pin and have no child on the device. Those with host
        pages stay as host-only nodes. Frees fewer pages when there are no more candidates.
        """
        pages: list[PageIds] = []
        nodes: list[Node] = []
        freed = 0
        while freed < n_pages:
            node = self._device_queue.pop()
            if node is None:
                break
            pages.append(self._take_off_device(node))
            nodes.append(node)
            freed += len(pages[-1])
        return DeviceEviction(_joined(pages), tuple(nodes))

    def evict_host(self, n_pages: int) -> PageIds:
        """Give up at least ``n_pages`` host pages of host-only leaves, least recently used first.

        Returns:
            ``(m,) int64`` freed host pages, fewer than ``n_pages`` when there are no more candidates. Their
            nodes have left the tree.
        """
        pages: list[PageIds] = []
        freed = 0
        while freed < n_pages:
            node = self._host_queue.pop()
            if node is None:
                break
            assert node.host_pages is not None  # a candidate has them
            pages.append(node.host_pages)
            freed += len(node.host_pages)
            self._host_total -= len(node.host_pages)
            self._host_evictable -= len(node.host_pages)
            self._remove(node)
        return _joined(pages)

    def unbacked(self, node: Node) -> tuple[Node, ...]:
        """Nodes from the root to ``node`` that have no host pages, in the order ``attach_host`` accepts them."""
        self._in_tree(node, "unbacked")
        return tuple(step for step in reversed(list(_up(node))) if step.host_pages is None)

    def attach_host(self, node: Node, pages: PageIds) -> None:
        """Give ``node`` host pages: a write-back into them is about to be submitted. Then set ``backing_up``.

        Attach at submission, not at completion: by then the node may have been split.

        Raises:
            ControllerError: ``node`` has host pages, its parent has none, or ``pages`` has the wrong length.
        """
        self._in_tree(node, "attach_host")
        if node.host_pages is not None:
            raise ControllerError(f"attach_host: {node!r} has host pages already")
        if node.parent is None or node.parent.host_pages is None:
            raise ControllerError(f"attach_host: the parent of {node!r} has no host pages; back up parents first")
        self._check_length("attach_host", node, pages)
        node.host_pages = pages.copy()
        node._host_sources = node.sources
        self._host_total += len(pages)

    def attach_device(self, node: Node, pages: PageIds, tenancies: Int64Array) -> None:
        """Give a host-only ``node`` device pages: a load-back is about to be submitted. Then set ``loading``.

        Raises:
            ControllerError: ``node`` or not its parent is on the device, or a length is wrong.
        """
        self._in_tree(node, "attach_device")
        if node.device_pages is not None:
            raise ControllerError(f"attach_device: {node!r} has device pages already")
        if node.parent is None or node.parent.device_pages is None:
            raise ControllerError(f"attach_device: the parent of {node!r} has no device pages; load parents first")
        self._check_length("attach_device", node, pages)
        self._check_length("attach_device", node, tenancies)
        self._put_on_device(node, pages.copy(), tenancies.copy(), node._host_sources)

    def check_invariants(self) -> None:
        """AssertionError unless all rules of this module hold. For tests: it visits every node."""
        device: list[PageIds] = []
        host: list[PageIds] = []
        evictable = {"device": 0, "host": 0}
        for node in self.nodes():
            self._check_node(node)
            for tier, pages, seen in (("device", node.device_pages, device), ("host", node.host_pages, host)):
                if pages is not None:
                    seen.append(pages)
                    if not node._holds and (tier == "device" or node.device_pages is None):
                        evictable[tier] += len(pages)
        totals = (("device", device, self._device_total), ("host", host, self._host_total))
        for tier, seen, total in totals:
            pages = _joined(seen)
            assert len(np.unique(pages)) == len(pages), f"two nodes own one {tier} page"
            assert len(pages) == total, f"{len(pages)} {tier} pages in the tree, the counter says {total}"
        counted = {"device": self._device_evictable, "host": self._host_evictable}
        assert counted == evictable, f"evictable pages are {evictable}, the counters say {counted}"
        self._device_queue.check_complete(self.nodes())
        self._host_queue.check_complete(self.nodes())

    def _check_node(self, node: Node) -> None:
        parent, count = node.parent, self._pages_of(node)
        assert parent is not None, f"{node!r}: no parent"
        assert parent.children.get(self._key(node.tokens)) is node, f"{node!r}: its parent has another child there"
        assert count * self.page_size == len(node.tokens) > 0, f"{node!r}: not a whole number of pages"
        assert node.device_pages is not None or node.host_pages is not None, f"{node!r}: on no tier"
        for pages in (node.device_pages, node.host_pages, node.sources):
            assert pages is None or len(pages) == count, f"{node!r}: an array has {len(pages)} entries"
        assert len(node.tenancies) == (0 if node.device_pages is None else count), f"{node!r}: tenancies"
        assert len(node._host_sources) == (0 if node.host_pages is None else count), f"{node!r}: host sources"
        assert node.device_pages is None or parent.device_pages is not None, f"{node!r}: parent not on the device"
        assert node.host_pages is None or parent.host_pages is not None, f"{node!r}: parent not in host memory"
        below = list(node.children.values())
        assert node._device_children == sum(c.device_pages is not None for c in below), f"{node!r}: children"
        assert node.lock_ref >= sum(child.lock_ref for child in below), f"{node!r}: fewer locks than below it"
        assert node.lock_ref >= 0, f"{node!r}: lock_ref {node.lock_ref}"
        own = node.lock_ref - sum(child.lock_ref for child in below)
        own += sum(pin is not None and pin.active and pin.node is node for pin in (node._loading, node._backing_up))
        assert node._holds == own + sum(child._holds for child in below), f"{node!r}: {node._holds} holds"
        pinned = node.loading or node.backing_up
        assert not pinned or node._holds, f"{node!r}: pinned, but not protected"
        both = node.device_pages is not None and node.host_pages is not None
        assert not pinned or both, f"{node!r}: pinned, but not on both tiers"

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _whole_pages(self, tokens: Int64Array) -> Int64Array:
        return np.ascontiguousarray(tokens[: len(tokens) // self.page_size * self.page_size], dtype=np.int64)

    def _key(self, tokens: Int64Array) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _pages_of(self, node: Node) -> int:
        return len(node.tokens) // self.page_size

    def _check_length(self, what: str, node: Node, values: Int64Array) -> None:
        if len(values) != self._pages_of(node):
            raise ControllerError(f"{what}: {len(values)} entries for the {self._pages_of(node)} pages of {node!r}")

    def _in_tree(self, node: Node, what: str) -> None:
        if node._cache is not self or (node.parent is None and node is not self.root):
            raise ControllerError(f"{what}: {node!r} is not in the tree (any more)")

    def _walk(self, tokens: Int64Array) -> Iterator[Node]:
        """Nodes that together hold the longest cached prefix; splits the last if only part of it matches."""
        self._tick += 1
        node, done = self.root, 0
        while done < len(tokens):
            child = node.children.get(self._key(tokens[done:]))
            if child is None:
                return
            common = self._common(child.tokens, tokens[done:])
            if common < len(child.tokens):
                child = self._split(child, common)
            child.last_access = self._tick
            yield child
            node, done = child, done + common

    def _common(self, cached: Int64Array, wanted: Int64Array) -> int:
        """Tokens both begin with, in whole pages; at least one page, which the caller has looked up."""
        length = min(len(cached), len(wanted))
        differs = cached[:length] != wanted[:length]
        first = int(differs.argmax())
        if differs[first]:
            length = first
        return length // self.page_size * self.page_size

    def _split(self, lower: Node, length: int) -> Node:
        """Cut ``lower`` after ``length`` tokens; returns the new node, its parent, that holds the first part."""
        parent, cut = lower.parent, length // self.page_size
        assert parent is not None  # the root has no tokens to split
        upper = Node(self, parent, lower.tokens[:length].copy())  # a view would keep the whole alive
        parent.children[self._key(upper.tokens)] = upper
        upper.lock_ref, upper._holds, upper.last_access = lower.lock_ref, lower._holds, lower.last_access
        upper._loading, upper._backing_up = lower._loading, lower._backing_up
        lower.tokens, lower.parent = lower.tokens[length:].copy(), upper
        upper.children[self._key(lower.tokens)] = lower
        if lower.device_pages is not None:
            upper.device_pages, lower.device_pages = lower.device_pages[:cut], lower.device_pages[cut:]
            upper.tenancies, lower.tenancies = lower.tenancies[:cut], lower.tenancies[cut:]
            upper._device_children = 1
        if lower.host_pages is not None:
            upper.host_pages, lower.host_pages = lower.host_pages[:cut], lower.host_pages[cut:]
            upper._host_sources, lower._host_sources = lower._host_sources[:cut], lower._host_sources[cut:]
        upper.sources, lower.sources = lower.sources[:cut], lower.sources[cut:]
        return upper

    def _put_on_device(self, node: Node, pages: PageIds, tenancies: Int64Array, sources: Int64Array) -> None:
        parent = node.parent
        assert parent is not None  # the root is on the device from the start
        if not node._holds and node.host_pages is not None:
            self._host_evictable -= len(pages)
        node.device_pages, node.tenancies, node.sources = pages, tenancies, sources
        parent._device_children += 1
        self._device_total += len(pages)
        if not node._holds:
            self._device_evictable += len(pages)
        self._queue(node)

    def _take_off_device(self, node: Node) -> PageIds:
        parent, pages = node.parent, node.device_pages
        assert parent is not None
        assert pages is not None  # the caller looked
        self._device_total -= len(pages)
        self._device_evictable -= len(pages)
        node.device_pages, node.tenancies = None, _EMPTY
        parent._device_children -= 1
        if node.host_pages is None:
            self._remove(node)
        else:
            node.sources = node._host_sources
            self._host_evictable += len(node.host_pages)
            self._queue(node)
        self._queue(parent)
        return pages

    def _remove(self, node: Node) -> None:
        """Take a leaf out of the tree."""
        parent = node.parent
        assert parent is not None
        assert not node.children  # device leaves without host pages have none, by the rule on host pages
        del parent.children[self._key(node.tokens)]
        node.parent = None
        self._queue(parent)

    def _hold(self, node: Node) -> None:
        node._holds += 1
        if node._holds == 1:
            self._count_evictable(node, -1)

    def _release(self, node: Node) -> None:
        node._holds -= 1
        if not node._holds:
            self._count_evictable(node, 1)
            self._queue(node)

    def _count_evictable(self, node: Node, sign: int) -> None:
        if node.device_pages is not None:
            self._device_evictable += sign * len(node.device_pages)
        elif node.host_pages is not None:
            self._host_evictable += sign * len(node.host_pages)

    def _pin(self, node: Node, pin: _Pin | None, pinned: bool, what: str) -> _Pin | None:
        active = pin is not None and pin.active
        if pinned:
            self._in_tree(node, what)
            if active:
                raise PagePinned(f"{what}: {node!r} is held by one that is in flight")
            if node.device_pages is None or node.host_pages is None or node is self.root:
                raise ControllerError(f"{what}: {node!r} needs pages on both tiers; attach them first")
            for step in _up(node):
                self._hold(step)
            return _Pin(node)
        if pin is not None and active:
            pin.active = False
            for step in _up(pin.node):
                self._release(step)
        return None

    def _queue(self, node: Node) -> None:
        """Make ``node`` findable by the eviction it has become a candidate of, if any."""
        self._device_queue.offer(node)
        self._host_queue.offer(node)


def _is_device_candidate(node: Node) -> bool:
    return node.device_pages is not None and not node._holds and not node._device_children and node.parent is not None


def _is_host_candidate(node: Node) -> bool:
    return (
        node.device_pages is None
        and node.host_pages is not None
        and not node._holds
        and not node.children
        and node.parent is not None
    )


def _up(node: Node) -> Iterator[Node]:
    """``node`` and its ancestors, the root excluded."""
    while node.parent is not None:
        yield node
        node = node.parent


def _joined(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate(parts) if parts else _EMPTY.copy()
