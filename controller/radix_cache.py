"""Which prompt prefixes are cached, on which tier, and what may be evicted.

A radix tree over page-aligned token sequences. A node's contents are on the device, in host memory, or on both.
Two rules keep every cached prefix reachable from the root, and checks refuse what would break them:

* a node on the device hangs below a node on the device (or the root);
* a node in host memory hangs below a node in host memory (or the root): back up parents first.

The tree is bookkeeping of the scheduler's thread, the only one that may use it. It moves no data and orders
nothing: a page returned by ``evict_device`` may still be read or written by launched work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hicache_obs.controller.eviction import EvictionQueue, rank_named
from hicache_obs.controller.radix_invariants import check_invariants
from hicache_obs.controller.radix_node import EMPTY, HostHold, Int64Array, Node, Pin, joined, upwards
from hicache_obs.controller.radix_results import DeviceEviction, HostInsertResult, InsertResult, Match
from hicache_obs.errors import ControllerError, PagePinned
from hicache_obs.records import PageIds

__all__ = ["DeviceEviction", "HostHold", "HostInsertResult", "InsertResult", "Match", "Node", "RadixCache"]


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

    def __init__(self, page_size: int, *, host_eviction: str = "lru") -> None:
        """An empty tree; ``host_eviction`` is one of ``EVICTION_POLICIES``, the device's is least recently used."""
        if page_size < 1:
            raise ControllerError(f"page_size: {page_size}; expected an integer ≥ 1")
        self.page_size = page_size
        self._ids = 0
        self._tick = 0
        self._device_total = self._host_total = 0
        self._device_evictable = self._host_evictable = 0
        self._device_queue = EvictionQueue(lambda node: node.device_candidate, rank_named("lru"))
        self._host_queue = EvictionQueue(lambda node: node.host_candidate, rank_named(host_eviction))
        self.root = Node(self, None, EMPTY)
        self.root.device_pages = self.root.host_pages = EMPTY

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

    def insert(
        self, tokens: Int64Array, pages: PageIds, tenancies: Int64Array, sources: Int64Array, *, priority: int = 0
    ) -> InsertResult:
        """Hand the device pages of a sequence to the tree.

        Args:
            tokens: ``(n * page_size,) int64`` from the start of the sequence.
            pages: ``(n,) int64`` device pages that hold them. Those the tree already owns at the same place (the
                caller's matched prefix) stay the tree's.
            tenancies, sources: ``(n,) int64``, of ``pages``.
            priority: Of the request that computed them.

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
            self._hang(node, last_node)
            node.uses, node.priority = 1, priority
            self._put_on_device(node, pages[done:], tenancies[done:], sources[done:])
            new_nodes, last_node = (node,), node
        return InsertResult(new_nodes, tuple(rematerialised), joined(duplicates), last_node)

    def lock(self, node: Node) -> None:
        """Protect ``node`` and its ancestors from eviction; partner of ``unlock``. Locks count."""
        self._in_tree(node, "lock")
        for step in upwards(node):
            step.lock_ref += 1
            self._hold(step)

    def unlock(self, node: Node) -> None:
        """Undo one ``lock`` of ``node``."""
        self._in_tree(node, "unlock")
        if node.lock_ref < 1 and node is not self.root:
            raise ControllerError(f"unlock: {node!r} is not locked")
        for step in upwards(node):
            step.lock_ref -= 1
            self._release(step)

    def record_use(self, node: Node, priority: int) -> None:
        """A request of ``priority`` was admitted with ``node`` and its ancestors, or has computed them."""
        self._in_tree(node, "record_use")
        for step in upwards(node):
            step.uses += 1
            step.priority = max(step.priority, priority)

    def hold_host(self, nodes: Sequence[Node]) -> HostHold:
        """Keep the host pages of ``nodes`` in host memory until ``release_host``. Holds count.

        Raises:
            ControllerError: One of them has no host pages.
        """
        for node in nodes:
            self._in_tree(node, "hold_host")
            if node.host_pages is None:
                raise ControllerError(f"hold_host: {node!r} has no host pages")
        hold = HostHold(list(nodes))
        for node in nodes:
            for step in upwards(node):
                if step.host_pages is not None and step.host_evictable:
                    self._host_evictable -= len(step.host_pages)
                step.host_holds += 1
        return hold

    def release_host(self, hold: HostHold) -> None:
        """End ``hold``; partner of ``hold_host``. ControllerError if it has ended before."""
        if not hold.nodes:
            raise ControllerError("release_host: the hold has ended before")
        for node in hold.nodes:
            for step in upwards(node):
                step.host_holds -= 1
                if step.host_pages is not None and step.host_evictable:
                    self._host_evictable += len(step.host_pages)
                self._queue(step)
        hold.nodes.clear()

    def evict_device(self, n_pages: int, *, before_drop: Callable[[Node], None] | None = None) -> DeviceEviction:
        """Give up at least ``n_pages`` device pages, least recently used nodes first, whole nodes at a time.

        Takes nodes that are not protected by a lock or a pin and have no child on the device. Those with host
        pages stay as host-only nodes. Frees fewer pages when there are no more candidates.

        Args:
            before_drop: Called with each node that is about to leave the tree for want of host pages. If it
                attaches some, the node stays.
        """
        pages: list[PageIds] = []
        nodes: list[Node] = []
        freed = 0
        while freed < n_pages:
            node = self._device_queue.pop()
            if node is None:
                break
            if before_drop is not None and node.host_pages is None:
                before_drop(node)
            pages.append(self._take_off_device(node))
            nodes.append(node)
            freed += len(pages[-1])
        return DeviceEviction(joined(pages), tuple(nodes))

    def evict_host(self, n_pages: int) -> PageIds:
        """Give up at least ``n_pages`` host pages of host-only leaves, as the eviction policy ranks them.

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
        return joined(pages)

    def unbacked(self, node: Node) -> tuple[Node, ...]:
        """Nodes from the root to ``node`` that have no host pages, in the order ``attach_host`` accepts them."""
        self._in_tree(node, "unbacked")
        return tuple(step for step in reversed(list(upwards(node))) if step.host_pages is None)

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
        self._put_on_host(node, pages.copy(), node.sources)

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

    def insert_host(self, tokens: Int64Array, first: int, pages: PageIds, sources: Int64Array) -> HostInsertResult:
        """Hand host pages that were filled from elsewhere to the tree; nothing may be writing them any more.

        The tree takes those it has no host page for, as long as everything before them is in host memory.

        Args:
            tokens: ``((first + n) * page_size,) int64`` from the start of the sequence.
            first: Pages of ``tokens`` before the first of ``pages``.
            pages: ``(n,) int64`` host pages with the contents of the ``n`` last pages of ``tokens``.
            sources: ``(n,) int64`` tenancies that produced these, -1 where that was in another process.

        Raises:
            ControllerError: The lengths do not belong together.
        """
        total = first + len(pages)
        if len(tokens) != total * self.page_size or len(sources) != len(pages):
            raise ControllerError(
                f"insert_host: {len(tokens)} tokens for {first} and {len(pages)} pages with {len(sources)} sources; "
                f"expected {self.page_size} tokens per page, one source per host page"
            )
        tokens = self._whole_pages(tokens)
        taken = np.zeros(len(pages), np.bool_)
        nodes: list[Node] = []
        done, last_node = 0, self.root
        for node in self._walk(tokens):
            end = done + self._pages_of(node)
            if node.host_pages is None:
                if done < first:
                    return HostInsertResult(tuple(nodes), pages[~taken])
                part = slice(done - first, end - first)
                self._put_on_host(node, pages[part].copy(), sources[part].copy())
                taken[part] = True
                nodes.append(node)
            done, last_node = end, node
        if first <= done < total:
            node = Node(self, last_node, tokens[done * self.page_size :].copy())
            self._hang(node, last_node)
            node.sources = sources[done - first :].copy()
            self._put_on_host(node, pages[done - first :].copy(), node.sources)
            self._host_evictable += len(node.sources)
            self._queue(node)
            taken[done - first :] = True
            nodes.append(node)
        return HostInsertResult(tuple(nodes), pages[~taken])

    def path(self, node: Node) -> Int64Array:
        """``(n,) int64`` tokens from the root to the end of ``node``."""
        self._in_tree(node, "path")
        return joined([step.tokens for step in reversed(list(upwards(node)))])

    def clear(self) -> tuple[PageIds, PageIds]:
        """Forget every prefix; returns the device pages and the host pages, which the caller frees.

        Raises:
            ControllerError: A node is locked, pinned or held. Nothing changed.
        """
        nodes = list(self.nodes())
        for node in nodes:
            if node._holds or node.host_holds:
                raise ControllerError(f"clear: {node!r} is in use: {node.lock_ref} locks, or a transfer in flight")
        device = joined([node.device_pages for node in nodes if node.device_pages is not None])
        host = joined([node.host_pages for node in nodes if node.host_pages is not None])
        for node in nodes:
            node.parent = None
            node.children = {}
        self.root.children = {}
        self.root._device_children = 0
        self._device_total = self._host_total = self._device_evictable = self._host_evictable = 0
        self._device_queue.clear()
        self._host_queue.clear()
        return device, host

    def check_invariants(self) -> None:
        """AssertionError unless all rules of this module hold. For tests: it visits every node."""
        check_invariants(self)

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
        upper.uses, upper.priority, upper.host_holds = lower.uses, lower.priority, lower.host_holds
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
        if node.host_evictable:
            self._host_evictable -= len(pages)
        node.device_pages, node.tenancies, node.sources = pages, tenancies, sources
        parent._device_children += 1
        self._device_total += len(pages)
        if not node._holds:
            self._device_evictable += len(pages)
        self._queue(node)

    def _put_on_host(self, node: Node, pages: PageIds, sources: Int64Array) -> None:
        node.host_pages, node._host_sources = pages, sources
        self._host_total += len(pages)

    def _hang(self, node: Node, parent: Node) -> None:
        """Put a new node into the tree."""
        node.last_access = self._tick
        parent.children[self._key(node.tokens)] = node

    def _take_off_device(self, node: Node) -> PageIds:
        parent, pages = node.parent, node.device_pages
        assert parent is not None
        assert pages is not None  # the caller looked
        self._device_total -= len(pages)
        self._device_evictable -= len(pages)
        node.device_pages, node.tenancies = None, EMPTY
        parent._device_children -= 1
        if node.host_pages is None:
            self._remove(node)
        else:
            node.sources = node._host_sources
            if node.host_evictable:
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
        elif node.host_pages is not None and not node.host_holds:
            self._host_evictable += sign * len(node.host_pages)

    def _pin(self, node: Node, pin: Pin | None, pinned: bool, what: str) -> Pin | None:
        active = pin is not None and pin.active
        if pinned:
            self._in_tree(node, what)
            if active:
                raise PagePinned(f"{what}: {node!r} is held by one that is in flight")
            if node.device_pages is None or node.host_pages is None or node is self.root:
                raise ControllerError(f"{what}: {node!r} needs pages on both tiers; attach them first")
            for step in upwards(node):
                self._hold(step)
            return Pin(node)
        if pin is not None and active:
            pin.active = False
            for step in upwards(pin.node):
                self._release(step)
        return None

    def _queue(self, node: Node) -> None:
        """Make ``node`` findable by the eviction it has become a candidate of, if any."""
        self._device_queue.offer(node)
        self._host_queue.offer(node)
