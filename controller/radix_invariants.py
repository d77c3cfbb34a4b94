"""The rules of the radix tree as checks. For tests: they visit every node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache_obs.controller.radix_node import Node, joined
from hicache_obs.records import PageIds

if TYPE_CHECKING:
    from hicache_obs.controller.radix_cache import RadixCache


def check_invariants(cache: RadixCache) -> None:
    """AssertionError unless all rules of the tree hold."""
    device: list[PageIds] = []
    host: list[PageIds] = []
    evictable = {"device": 0, "host": 0}
    for node in cache.nodes():
        _check_node(cache, node)
        if node.device_pages is not None:
            device.append(node.device_pages)
            evictable["device"] += 0 if node._holds else len(node.device_pages)
        if node.host_pages is not None:
            host.append(node.host_pages)
            evictable["host"] += len(node.host_pages) if node.host_evictable else 0
    totals = (("device", device, cache.device_pages_total), ("host", host, cache.host_pages_total))
    for tier, seen, total in totals:
        pages = joined(seen)
        assert len(np.unique(pages)) == len(pages), f"two nodes own one {tier} page"
        assert len(pages) == total, f"{len(pages)} {tier} pages in the tree, the counter says {total}"
    counted = {"device": cache.device_evictable_pages, "host": cache.host_evictable_pages}
    assert counted == evictable, f"evictable pages are {evictable}, the counters say {counted}"
    cache._device_queue.check_complete(cache.nodes())
    cache._host_queue.check_complete(cache.nodes())


def _check_node(cache: RadixCache, node: Node) -> None:
    parent, count = node.parent, len(node.tokens) // cache.page_size
    assert parent is not None, f"{node!r}: no parent"
    assert parent.children.get(cache._key(node.tokens)) is node, f"{node!r}: its parent has another child there"
    assert count * cache.page_size == len(node.tokens) > 0, f"{node!r}: not a whole number of pages"
    assert node.device_pages is not None or node.host_pages is not None, f"{node!r}: on no tier"
    for pages in (node.device_pages, node.host_pages, node.sources):
        assert pages is None or len(pages) == count, f"{node!r}: an array has {len(pages)} entries"
    assert len(node.tenancies) == (0 if node.device_pages is None else count), f"{node!r}: tenancies"
    assert len(node.host_sources) == (0 if node.host_pages is None else count), f"{node!r}: host sources"
    assert node.device_pages is None or parent.device_pages is not None, f"{node!r}: parent not on the device"
    assert node.host_pages is None or parent.host_pages is not None, f"{node!r}: parent not in host memory"
    _check_holds(node, list(node.children.values()))


def _check_holds(node: Node, below: list[Node]) -> None:
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
    assert not node.host_holds or node.host_pages is not None, f"{node!r}: held in host memory, but not there"
    assert node.host_holds >= sum(child.host_holds for child in below), f"{node!r}: fewer holds than below it"
