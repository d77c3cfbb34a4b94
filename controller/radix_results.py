"""What the radix tree answers."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_obs.controller.radix_node import Int64Array, Node, joined
from hicache_obs.records import PageIds


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
        return joined([node.device_pages for node in self.device_nodes if node.device_pages is not None])

    def host_pages(self) -> PageIds:
        """``(host_len / page_size,) int64``."""
        return joined([node.host_pages for node in self.host_nodes if node.host_pages is not None])

    def tenancies(self) -> Int64Array:
        """Of ``device_pages``."""
        return joined([node.tenancies for node in self.device_nodes])

    def sources(self) -> Int64Array:
        """Of ``device_pages``."""
        return joined([node.sources for node in self.device_nodes])


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
class HostInsertResult:
    """What ``insert_host`` did with the caller's host pages.

    Attributes:
        nodes: Nodes that took some of them.
        left_pages: Those the tree did not take; the caller frees them.
    """

    nodes: tuple[Node, ...]
    left_pages: PageIds


@dataclass(frozen=True, slots=True, eq=False)
class DeviceEviction:
    """What ``evict_device`` took off the device.

    Attributes:
        pages: Device pages nobody owns now; the caller frees them.
        nodes: The nodes they belonged to, in eviction order. Those without host pages have left the tree.
    """

    pages: PageIds
    nodes: tuple[Node, ...]
