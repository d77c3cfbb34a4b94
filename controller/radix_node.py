"""One node of the radix tree, and what keeps its pages where they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from hicache_obs.records import PageIds

if TYPE_CHECKING:
    from hicache_obs.controller.radix_cache import RadixCache

Int64Array = npt.NDArray[np.int64]

EMPTY: Final[Int64Array] = np.empty(0, dtype=np.int64)


class Pin:
    """One transfer's hold on a node. A split shares it between both parts, so it ends for both at once."""

    __slots__ = ("active", "node")

    def __init__(self, node: Node) -> None:
        self.active = True
        self.node = node


class HostHold:
    """Somebody's hold on the host pages of some nodes; from ``RadixCache.hold_host`` to ``release_host``.

    It keeps the pages of the nodes and their ancestors in host memory and nothing else: they may leave the device.
    A node that is split is held in both its parts.

    Attributes:
        nodes: The nodes held; empty once the hold has ended.
    """

    __slots__ = ("nodes",)

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes


class Node:
    """A run of whole pages of tokens below its parent's. Changed by ``RadixCache`` only, but for the two pins.

    Attributes:
        node_id: Creation order.
        tokens: ``(p * page_size,) int64``.
        device_pages, host_pages: ``(p,) int64`` page ids, or ``None`` when not on that tier. Never written to:
            a change replaces the array, so a transfer may keep the one it was submitted with.
        tenancies: ``(p,) int64`` ledger tenancies of the device pages; empty when not on the device.
        sources: ``(p,) int64`` tenancies that produced the contents a reader of this node gets: those on the
            device, else those in host memory. -1 where that was in another process.
        parent: ``None`` for the root and for a node that left the tree.
        children: By the bytes of their first page of tokens.
        lock_ref: Requests that use this node or one below it. Locked nodes are not evicted from any tier.
        last_access: Value of the tree's access counter when last matched or inserted. Not a clock.
        uses: Requests that were admitted with this node, the one that computed it included.
        priority: Highest priority of those requests.
        host_holds: Holds on the host pages of this node or one below it.
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
        "host_holds",
        "host_pages",
        "last_access",
        "lock_ref",
        "node_id",
        "parent",
        "priority",
        "sources",
        "tenancies",
        "tokens",
        "uses",
    )

    def __init__(self, cache: RadixCache, parent: Node | None, tokens: Int64Array) -> None:
        self._cache = cache
        self.node_id = cache._next_id()
        self.parent = parent
        self.tokens = tokens
        self.children: dict[bytes, Node] = {}
        self.device_pages: PageIds | None = None
        self.host_pages: PageIds | None = None
        self.tenancies: Int64Array = EMPTY
        self.sources: Int64Array = EMPTY
        self.lock_ref = 0
        self.last_access = 0
        self.uses = 0
        self.priority = 0
        self.host_holds = 0
        self._host_sources: Int64Array = EMPTY
        self._holds = 0  # locks and pins of this node and of all below it
        self._device_children = 0
        self._loading: Pin | None = None
        self._backing_up: Pin | None = None

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

    @property
    def host_sources(self) -> Int64Array:
        """``(p,) int64`` tenancies that produced the contents of the host pages, as ``sources``; empty without."""
        return self._host_sources

    @property
    def host_evictable(self) -> bool:
        """Whether the node counts as room in host memory: there only, and nothing holds it."""
        return self.device_pages is None and self.host_pages is not None and not self._holds and not self.host_holds

    @property
    def device_candidate(self) -> bool:
        """Whether ``evict_device`` may take the node now."""
        on_device = self.device_pages is not None and not self._device_children
        return on_device and not self._holds and self.parent is not None

    @property
    def host_candidate(self) -> bool:
        """Whether ``evict_host`` may take the node now."""
        return self.host_evictable and not self.children and self.parent is not None


def upwards(node: Node) -> Iterator[Node]:
    """``node`` and its ancestors, the root excluded."""
    while node.parent is not None:
        yield node
        node = node.parent


def last_nodes(node: Node, tokens: int) -> list[Node]:
    """Nodes that together hold the last ``tokens`` up to the end of ``node``, parents first."""
    nodes: list[Node] = []
    for step in upwards(node):
        if tokens <= 0:
            break
        nodes.append(step)
        tokens -= len(step.tokens)
    return nodes[::-1]


def joined(parts: list[Int64Array]) -> Int64Array:
    """One array of all ``parts``."""
    return np.concatenate(parts) if parts else EMPTY.copy()
