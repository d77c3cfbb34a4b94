"""The radix cache: worked examples, refusals, and everything at random against a dictionary."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache_obs.controller.radix_cache import HostHold, InsertResult, Node, RadixCache
from hicache_obs.errors import ConfigError, ControllerError, PagePinned
from hicache_obs.records import page_ids

PAGE = 2


def tokens(text: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Two tokens per letter: pages "a" and "A" share their first token only."""
    return np.array([t for c in text for t in (ord(c.lower()), ord(c))], dtype=np.int64)


def insert(cache: RadixCache, text: str, first_page: int) -> InsertResult:
    """Insert ``text`` with pages ``first_page...``; tenancies are 100 more, and their own sources."""
    pages = np.arange(first_page, first_page + len(text), dtype=np.int64)
    return cache.insert(tokens(text), pages, pages + 100, pages + 100)


def backed_up(cache: RadixCache, node: Node, first_page: int) -> Node:
    cache.attach_host(node, np.arange(first_page, first_page + len(node.tokens) // PAGE, dtype=np.int64))
    return node


def matched(cache: RadixCache, text: str) -> tuple[list[int], list[int]]:
    """Device and host pages of the match."""
    match = cache.match(tokens(text))
    assert match.device_len == PAGE * len(match.device_pages())
    assert match.host_len == PAGE * len(match.host_pages())
    cache.check_invariants()
    return match.device_pages().tolist(), match.host_pages().tolist()


def test_match_is_the_longest_prefix_in_whole_pages() -> None:
    cache = RadixCache(PAGE)
    assert matched(cache, "abc") == ([], [])
    insert(cache, "abc", 0)
    assert matched(cache, "abcd") == ([0, 1, 2], [])
    assert matched(cache, "abx") == ([0, 1], [])
    assert matched(cache, "aBc") == ([0], [])  # differs in the second half of page 1
    assert matched(cache, "xabc") == ([], [])
    assert cache.match(tokens("abc")[:-1]).device_len == 2 * PAGE
    assert cache.match(tokens("")).last_node is cache.root


def test_insert_returns_the_pages_the_device_has_elsewhere() -> None:
    cache = RadixCache(PAGE)
    assert insert(cache, "ab", 0).duplicate_pages.tolist() == []
    again = insert(cache, "abc", 10)
    assert again.duplicate_pages.tolist() == [10, 11]
    assert [node.device_pages.tolist() for node in again.new_nodes if node.device_pages is not None] == [[12]]
    assert again.last_node is again.new_nodes[0]
    assert matched(cache, "abc") == ([0, 1, 12], [])


def test_a_matched_prefix_handed_back_is_no_duplicate() -> None:
    cache = RadixCache(PAGE)
    insert(cache, "ab", 0)
    result = cache.insert(tokens("abc"), page_ids([0, 1, 5]), page_ids([100, 101, 105]), page_ids([100, 101, 105]))
    assert result.duplicate_pages.tolist() == []
    assert result.last_node.tenancies.tolist() == [105]
    nothing_new = cache.insert(tokens("ab"), page_ids([0, 9]), page_ids([1, 2]), page_ids([1, 2]))
    assert nothing_new.duplicate_pages.tolist() == [9]
    assert (nothing_new.new_nodes, nothing_new.rematerialised) == ((), ())


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    cache = RadixCache(PAGE)
    insert(cache, "ab", 0)
    insert(cache, "ac", 10)  # splits: a -> b, c; page 10 is a duplicate
    insert(cache, "d", 20)
    cache.match(tokens("ab"))
    assert cache.device_evictable_pages == 4
    assert cache.evict_device(1).pages.tolist() == [11]  # c
    assert cache.evict_device(1).pages.tolist() == [20]  # d
    assert cache.evict_device(9).pages.tolist() == [1, 0]  # b, then its parent
    assert cache.evict_device(1).pages.tolist() == []
    assert list(cache.nodes()) == []
    cache.check_invariants()


def test_eviction_frees_whole_nodes() -> None:
    cache = RadixCache(PAGE)
    insert(cache, "abc", 0)
    evicted = cache.evict_device(2)
    assert evicted.pages.tolist() == [0, 1, 2]
    assert len(evicted.nodes) == 1


def test_lock_protects_ancestors_from_eviction_until_unlocked() -> None:
    cache = RadixCache(PAGE)
    insert(cache, "ab", 0)
    leaf = insert(cache, "ac", 10).last_node
    cache.lock(leaf)
    assert cache.device_evictable_pages == 1
    assert cache.evict_device(9).pages.tolist() == [1]
    cache.unlock(leaf)
    assert cache.evict_device(9).pages.tolist() == [11, 0]


def test_locks_count() -> None:
    cache = RadixCache(PAGE)
    node = insert(cache, "ab", 0).last_node
    cache.lock(node)
    cache.lock(node)
    cache.unlock(node)
    assert cache.evict_device(1).pages.tolist() == []
    cache.unlock(node)
    assert cache.evict_device(1).pages.tolist() == [0, 1]


def test_backed_up_node_stays_on_the_host_and_comes_back() -> None:
    cache = RadixCache(PAGE)
    node = backed_up(cache, insert(cache, "ab", 0).last_node, 50)
    assert cache.host_evictable_pages == 0  # still on the device
    cache.evict_device(1)
    assert matched(cache, "abc") == ([], [50, 51])
    assert (node.tenancies.tolist(), node.sources.tolist()) == ([], [100, 101])
    assert (cache.device_pages_total, cache.host_pages_total, cache.host_evictable_pages) == (0, 2, 2)
    cache.attach_device(node, page_ids([7, 8]), page_ids([200, 201]))
    node.loading = True
    assert matched(cache, "abc") == ([7, 8], [])
    assert (node.tenancies.tolist(), node.sources.tolist()) == ([200, 201], [100, 101])


def test_host_eviction_takes_host_only_leaves_least_recently_used_first() -> None:
    cache = RadixCache(PAGE)
    parent = backed_up(cache, insert(cache, "a", 0).last_node, 50)
    child = backed_up(cache, insert(cache, "ab", 10).last_node, 60)
    other = backed_up(cache, insert(cache, "x", 20).last_node, 70)
    assert cache.evict_host(9).tolist() == []  # all are on the device
    cache.evict_device(9)
    cache.lock(other)
    assert cache.host_evictable_pages == 2
    assert cache.evict_host(9).tolist() == [60, 50]
    cache.unlock(other)
    assert cache.evict_host(1).tolist() == [70]
    assert [node.parent for node in (parent, child, other)] == [None] * 3
    cache.check_invariants()


def test_rematerialised_node_takes_the_callers_pages_and_keeps_the_host_copys_source() -> None:
    cache = RadixCache(PAGE)
    node = backed_up(cache, insert(cache, "ab", 0).last_node, 50)
    cache.evict_device(2)
    result = insert(cache, "abc", 10)
    assert (result.rematerialised, result.duplicate_pages.tolist()) == ((node,), [])
    assert matched(cache, "abc") == ([10, 11, 12], [])
    assert node.sources.tolist() == [110, 111]  # the device holds what was computed again
    cache.evict_device(3)
    assert node.sources.tolist() == [100, 101]  # the host still holds what was backed up
    cache.attach_device(node, page_ids([7, 8]), page_ids([200, 201]))
    assert node.sources.tolist() == [100, 101]


@pytest.mark.parametrize("pin", ["loading", "backing_up"])
def test_pin_protects_the_node_and_its_ancestors(pin: str) -> None:
    cache = RadixCache(PAGE)
    parent = backed_up(cache, insert(cache, "a", 0).last_node, 50)
    child = backed_up(cache, insert(cache, "ab", 10).last_node, 60)
    setattr(child, pin, True)
    cache.check_invariants()
    assert cache.evict_device(9).pages.tolist() == []
    setattr(child, pin, False)
    setattr(child, pin, False)  # clearing twice is one clearing
    assert cache.evict_device(9).nodes == (child, parent)


@pytest.mark.parametrize("pin", ["loading", "backing_up"])
@pytest.mark.parametrize("release", ["lower", "upper"])
def test_split_of_a_pinned_node_shares_the_pin(pin: str, release: str) -> None:
    cache = RadixCache(PAGE)
    lower = backed_up(cache, insert(cache, "abcd", 0).last_node, 50)
    submitted = lower.device_pages
    setattr(lower, pin, True)
    cache.lock(lower)
    assert matched(cache, "abx") == ([0, 1], [])
    upper = lower.parent
    assert upper is not None
    assert [node.device_pages.tolist() for node in (upper, lower) if node.device_pages is not None] == [[0, 1], [2, 3]]
    assert [node.host_pages.tolist() for node in (upper, lower) if node.host_pages is not None] == [[50, 51], [52, 53]]
    assert [node.sources.tolist() for node in (upper, lower)] == [[100, 101], [102, 103]]
    assert submitted is not None
    assert submitted.tolist() == [0, 1, 2, 3]  # what the transfer was given
    assert [getattr(node, pin) for node in (upper, lower)] == [True, True]
    setattr({"lower": lower, "upper": upper}[release], pin, False)
    assert [getattr(node, pin) for node in (upper, lower)] == [False, False]
    assert cache.evict_device(9).pages.tolist() == []  # the lock covers both parts
    cache.unlock(lower)
    assert cache.evict_device(9).pages.tolist() == [2, 3, 0, 1]
    cache.check_invariants()


def test_pin_after_a_split_is_not_shared() -> None:
    cache = RadixCache(PAGE)
    lower = backed_up(cache, insert(cache, "abcd", 0).last_node, 50)
    lower.backing_up = True
    cache.match(tokens("ab"))
    lower.backing_up = False
    lower.backing_up = True
    assert lower.parent is not None
    assert (lower.backing_up, lower.parent.backing_up) == (True, False)
    cache.check_invariants()


def test_unbacked_lists_parents_first() -> None:
    cache = RadixCache(PAGE)
    first = insert(cache, "a", 0).last_node
    second = insert(cache, "ab", 10).last_node
    third = insert(cache, "abc", 20).last_node
    backed_up(cache, first, 50)
    assert cache.unbacked(third) == (second, third)
    assert cache.unbacked(first) == cache.unbacked(cache.root) == ()


@dataclass
class Scene:
    """A cache with a backed-up node on the device, its child, and a host-only node."""

    cache: RadixCache = field(default_factory=lambda: RadixCache(PAGE))

    def __post_init__(self) -> None:
        cache = self.cache
        self.host_only = backed_up(cache, insert(cache, "xy", 30).last_node, 60)
        self.below = backed_up(cache, insert(cache, "xyz", 40).last_node, 70)
        self.gone = insert(cache, "q", 39).last_node
        cache.evict_device(9)
        self.node = insert(cache, "ab", 0).last_node
        self.child = insert(cache, "abc", 10).last_node


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: RadixCache(0), "page_size: 0; expected an integer ≥ 1"),
        (lambda s: s.cache.unlock(s.node), "unlock: {node} is not locked"),
        (lambda s: s.cache.lock(s.gone), "lock: {gone} is not in the tree (any more)"),
        (lambda s: s.cache.lock(RadixCache(PAGE).root), "lock: {root} is not in the tree (any more)"),
        (
            lambda s: s.cache.insert(tokens("ab"), page_ids([1]), page_ids([1]), page_ids([1, 2])),
            "insert: 4 tokens, 1 pages, 1 tenancies and 2 sources; "
            "expected 2 tokens, one tenancy and one source per page",
        ),
        (
            lambda s: s.cache.attach_host(s.child, page_ids([80])),
            "attach_host: the parent of {child} has no host pages; back up parents first",
        ),
        (
            lambda s: s.cache.attach_host(s.node, page_ids([80])),
            "attach_host: 1 entries for the 2 pages of {node}",
        ),
        (
            lambda s: s.cache.attach_host(s.host_only, page_ids([80, 81])),
            "attach_host: {host_only} has host pages already",
        ),
        (
            lambda s: s.cache.attach_device(s.below, page_ids([80]), page_ids([9])),
            "attach_device: the parent of {below} has no device pages; load parents first",
        ),
        (
            lambda s: s.cache.attach_device(s.host_only, page_ids([8, 9]), page_ids([9])),
            "attach_device: 1 entries for the 2 pages of {host_only}",
        ),
        (
            lambda s: s.cache.attach_device(s.node, page_ids([8, 9]), page_ids([8, 9])),
            "attach_device: {node} has device pages already",
        ),
        (
            lambda s: setattr(s.host_only, "loading", True),
            "load-back: {host_only} needs pages on both tiers; attach them first",
        ),
        (
            lambda s: setattr(s.node, "backing_up", True),
            "write-back: {node} needs pages on both tiers; attach them first",
        ),
    ],
)
def test_refusals_change_nothing(call: Callable[[Scene], object], message: str) -> None:
    scene = Scene()
    nodes = {name: repr(getattr(scene, name)) for name in ("node", "child", "host_only", "below", "gone")}
    before = [repr(node) for node in scene.cache.nodes()]
    with pytest.raises(ControllerError) as refused:
        call(scene)
    assert str(refused.value) == message.format(root="<Node 1: 0 tokens on device and host>", **nodes)
    assert [repr(node) for node in scene.cache.nodes()] == before
    scene.cache.check_invariants()


def test_second_load_back_of_a_node_in_flight_is_refused() -> None:
    cache = RadixCache(PAGE)
    node = backed_up(cache, insert(cache, "ab", 0).last_node, 50)
    node.loading = True
    with pytest.raises(PagePinned) as refused:
        node.loading = True
    assert str(refused.value) == ("load-back: <Node 2: 4 tokens on device and host> is held by one that is in flight")
    node.loading = False
    node.loading = True
    cache.check_invariants()


def test_eviction_does_not_scan() -> None:
    """Evicting one of 10,000 nodes looks at a few of them."""
    cache = RadixCache(1)
    for i in range(10_000):
        one = page_ids([i])
        cache.insert(one, one, one, one)
    looked, is_candidate = 0, cache._device_queue._is_candidate

    def counting(node: Node) -> bool:
        nonlocal looked
        looked += 1
        return is_candidate(node)

    cache._device_queue._is_candidate = counting
    assert [cache.evict_device(1).pages.tolist() for _ in range(1000)] == [[page] for page in range(1000)]
    assert looked <= 5 * 1000


def on_host(cache: RadixCache, *texts: str) -> dict[int, str]:
    """Each text backed up and taken off the device; text by its host page."""
    pages = {}
    for number, text in enumerate(texts):
        backed_up(cache, insert(cache, text, 10 * number).last_node, 100 + number)
        pages[100 + number] = text
    cache.evict_device(99)
    return pages


@pytest.mark.parametrize(
    ("policy", "order"), [("lru", "bcda"), ("lfu", "dbca"), ("priority", "cabd")], ids=["lru", "lfu", "priority"]
)
def test_what_host_memory_gives_up_first(policy: str, order: str) -> None:
    cache = RadixCache(PAGE, host_eviction=policy)
    pages = on_host(cache, "a", "b", "c", "d")
    for text, priority in (("a", 1), ("c", 0), ("b", 2), ("b", 0), ("d", 3), ("c", 0), ("a", 0), ("a", 0)):
        cache.record_use(cache.match(tokens(text)).last_node, priority)
    for text in "bcda":  # least recently used first
        cache.match(tokens(text))
    assert [pages[int(cache.evict_host(1)[0])] for _ in order] == list(order)


def test_the_eviction_policy_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match=r"^host_eviction: 'random'; expected one of lru, lfu, priority$"):
        RadixCache(PAGE, host_eviction="random")


def test_a_hold_keeps_host_pages_and_nothing_else() -> None:
    cache = RadixCache(PAGE)
    parent = backed_up(cache, insert(cache, "ab", 0).last_node, 50)
    child = backed_up(cache, insert(cache, "abc", 10).last_node, 60)
    hold = cache.hold_host([child])
    assert len(cache.evict_device(9).pages) == 3
    assert cache.host_evictable_pages == 0
    assert cache.evict_host(9).tolist() == []
    cache.match(tokens("a"))  # splits the parent
    cache.check_invariants()
    cache.release_host(hold)
    assert cache.host_evictable_pages == 3
    assert sorted(cache.evict_host(9).tolist()) == [50, 51, 60]
    assert (parent.parent, child.parent) == (None, None)
    with pytest.raises(ControllerError, match="release_host: the hold has ended before"):
        cache.release_host(hold)


def test_only_what_is_in_host_memory_can_be_held() -> None:
    cache = RadixCache(PAGE)
    node = insert(cache, "a", 0).last_node
    with pytest.raises(ControllerError, match=r"hold_host: .* has no host pages"):
        cache.hold_host([node])


def test_a_node_that_is_about_to_be_lost_may_be_kept() -> None:
    cache = RadixCache(PAGE)
    insert(cache, "a", 0)
    insert(cache, "b", 1)
    dropped: list[Node] = []

    def keep_a(node: Node) -> None:
        dropped.append(node)
        if node.tokens[0] == ord("a"):
            cache.attach_host(node, page_ids([7]))

    assert cache.evict_device(2, before_drop=keep_a).pages.tolist() == [0, 1]
    assert len(dropped) == 2
    assert matched(cache, "a") == ([], [7])
    assert matched(cache, "b") == ([], [])


def test_host_pages_from_elsewhere() -> None:
    """Taken behind what is in host memory; a device-only prefix must be backed up first."""
    cache = RadixCache(PAGE)
    node = insert(cache, "ab", 0).last_node
    refused = cache.insert_host(tokens("abcd"), 2, page_ids([5, 6]), page_ids([1, 2]))
    assert (refused.nodes, refused.left_pages.tolist()) == ((), [5, 6])
    backed_up(cache, node, 50)
    taken = cache.insert_host(tokens("abcd"), 2, page_ids([5, 6]), page_ids([1, 2]))
    assert taken.left_pages.tolist() == []
    assert matched(cache, "abcd") == ([0, 1], [5, 6])
    again = cache.insert_host(tokens("abcde"), 2, page_ids([7, 8, 9]), page_ids([3, 4, 5]))
    assert again.left_pages.tolist() == [7, 8]
    assert matched(cache, "abcde") == ([0, 1], [5, 6, 9])
    with pytest.raises(ControllerError, match="insert_host: 4 tokens for 1 and 2 pages with 2 sources"):
        cache.insert_host(tokens("ab"), 1, page_ids([1, 2]), page_ids([1, 2]))


Path = tuple[str, ...]


@dataclass
class ModelPage:
    """What the dictionary says of the page at the end of a path."""

    device: int | None = None
    host: int | None = None
    tenancy: int | None = None
    source: int | None = None
    host_source: int | None = None
    pins: set[str] = field(default_factory=set)


class AgainstADictionary(RuleBasedStateMachine):
    """Any order of operations; a dictionary from page paths to pages knows what must come out."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache(PAGE)
        self.model: dict[Path, ModelPage] = {}
        self.next_page = 0
        self.locks: list[tuple[Node, Path]] = []
        self.transfers: list[tuple[str, Node, list[Path]]] = []
        self.holds: list[tuple[HostHold, Path]] = []

    texts = st.text("abAB", max_size=6)

    def fresh(self, n: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        self.next_page += n
        return np.arange(self.next_page - n, self.next_page, dtype=np.int64)

    def path(self, node: Node) -> Path:
        """Letters from the root to the end of ``node``."""
        letters: list[str] = []
        step: Node | None = node
        while step is not None:
            letters[:0] = [chr(t) for t in step.tokens[1::PAGE]]
            step = step.parent
        return tuple(letters)

    def paths(self, node: Node) -> list[Path]:
        """Paths of the pages of ``node``."""
        path = self.path(node)
        return [path[:end] for end in range(len(path) - len(node.tokens) // PAGE + 1, len(path) + 1)]

    def held(self) -> set[Path]:
        ends = [path for _node, path in self.locks] + [paths[-1] for _kind, _node, paths in self.transfers]
        return {path[:end] for path in ends for end in range(1, len(path) + 1)}

    def kept_on_host(self) -> set[Path]:
        held = {path[:end] for _hold, path in self.holds for end in range(1, len(path) + 1)}
        return held | self.held()

    def leading(self, text: str, tier: str, start: int = 0) -> list[Path]:
        found = []
        for end in range(start + 1, len(text) + 1):
            page = self.model.get(tuple(text[:end]))
            if page is None or getattr(page, tier) is None:
                break
            found.append(tuple(text[:end]))
        return found

    @rule(text=texts, reuse=st.booleans())
    def insert(self, text: str, reuse: bool) -> None:
        pages, tenancies = self.fresh(len(text)), self.fresh(len(text))
        sources = tenancies.copy()
        if reuse:  # as a request does that matched first
            match = self.cache.match(tokens(text))
            n = len(match.device_pages())
            pages[:n], tenancies[:n], sources[:n] = match.device_pages(), match.tenancies(), match.sources()
        result = self.cache.insert(tokens(text), pages, tenancies, sources)
        duplicates: list[int] = []
        for end, (page, tenancy, source) in enumerate(zip(pages, tenancies, sources, strict=True), start=1):
            known = self.model.setdefault(tuple(text[:end]), ModelPage())
            if known.device is None:
                known.device, known.tenancy, known.source = int(page), int(tenancy), int(source)
            elif known.device != page:
                duplicates.append(int(page))
        assert result.duplicate_pages.tolist() == duplicates
        assert self.path(result.last_node) == tuple(text)

    @rule(text=texts)
    def match(self, text: str) -> None:
        match = self.cache.match(tokens(text))
        device = self.leading(text, "device")
        host = self.leading(text, "host", len(device))
        assert match.device_pages().tolist() == [self.model[path].device for path in device]
        assert match.tenancies().tolist() == [self.model[path].tenancy for path in device]
        assert match.sources().tolist() == [self.model[path].source for path in device]
        assert match.host_pages().tolist() == [self.model[path].host for path in host]
        assert self.path(match.last_node) == tuple(text[: len(device) + len(host)])

    @rule(text=texts)
    def lock(self, text: str) -> None:
        node = self.cache.match(tokens(text)).last_node
        self.cache.lock(node)
        self.locks.append((node, self.path(node)))

    @precondition(lambda self: self.locks)
    @rule(which=st.integers(0, 99))
    def unlock(self, which: int) -> None:
        node, path = self.locks.pop(which % len(self.locks))
        assert self.path(node) == path  # splits move the upper end of a node only
        self.cache.unlock(node)

    @rule(text=texts)
    def back_up(self, text: str) -> None:
        nodes = self.cache.match(tokens(text)).device_nodes
        for node in self.cache.unbacked(nodes[-1]) if nodes else ():
            pages = self.fresh(len(node.tokens) // PAGE)
            self.cache.attach_host(node, pages)
            node.backing_up = True
            self.submit("backing_up", node)
            for path, page in zip(self.paths(node), pages, strict=True):
                known = self.model[path]
                known.host, known.host_source = int(page), known.source

    @rule(text=texts)
    def load(self, text: str) -> None:
        for node in self.cache.match(tokens(text)).host_nodes:
            pages, tenancies = self.fresh(len(node.tokens) // PAGE), self.fresh(len(node.tokens) // PAGE)
            self.cache.attach_device(node, pages, tenancies)
            node.loading = True
            self.submit("loading", node)
            for path, page, tenancy in zip(self.paths(node), pages, tenancies, strict=True):
                known = self.model[path]
                known.device, known.tenancy, known.source = int(page), int(tenancy), known.host_source

    def submit(self, kind: str, node: Node) -> None:
        self.transfers.append((kind, node, self.paths(node)))
        for path in self.paths(node):
            self.model[path].pins.add(kind)

    @rule(text=texts)
    def hold_host(self, text: str) -> None:
        match = self.cache.match(tokens(text))
        nodes = [node for node in (*match.device_nodes, *match.host_nodes) if node.host_pages is not None]
        if nodes:
            self.holds.append((self.cache.hold_host([nodes[-1]]), self.path(nodes[-1])))

    @precondition(lambda self: self.holds)
    @rule(which=st.integers(0, 99))
    def release_host(self, which: int) -> None:
        hold, path = self.holds.pop(which % len(self.holds))
        assert self.path(hold.nodes[-1]) == path
        self.cache.release_host(hold)

    @rule(text=texts, first=st.integers(0, 6))
    def insert_host(self, text: str, first: int) -> None:
        first = min(first, len(text))
        pages, sources = self.fresh(len(text) - first), self.fresh(len(text) - first)
        match = self.cache.match(tokens(text))
        taken: list[Path] = []
        cached = done = 0
        for node in (*match.device_nodes, *match.host_nodes):
            done = cached
            cached += len(node.tokens) // PAGE
            if node.host_pages is None:
                if done < first:
                    break
                taken += self.paths(node)
        else:
            if cached >= first:
                taken += [tuple(text[:end]) for end in range(cached + 1, len(text) + 1)]
        result = self.cache.insert_host(tokens(text), first, pages, sources)
        left = set(result.left_pages.tolist())
        for end, page, source in zip(range(first + 1, len(text) + 1), pages.tolist(), sources.tolist(), strict=True):
            path = tuple(text[:end])
            assert (path in taken) == (page not in left)
            if path in taken:
                known = self.model.setdefault(path, ModelPage())
                known.host, known.host_source = page, source
                known.source = source if known.device is None else known.source

    @rule()
    def clear(self) -> None:
        """Refused while anything is held; and a refusal changes nothing."""
        if self.kept_on_host():
            with pytest.raises(ControllerError, match=r"clear: .* is in use"):
                self.cache.clear()
            return
        device, host = (set(pages.tolist()) for pages in self.cache.clear())
        assert device == {page.device for page in self.model.values()} - {None}
        assert host == {page.host for page in self.model.values()} - {None}
        self.model.clear()

    @precondition(lambda self: self.transfers)
    @rule(which=st.integers(0, 99))
    def complete(self, which: int) -> None:
        kind, node, paths = self.transfers.pop(which % len(self.transfers))
        setattr(node, kind, False)
        for path in paths:
            self.model[path].pins.remove(kind)

    @rule(n=st.integers(1, 8))
    def evict_device(self, n: int) -> None:
        expected = self.oldest_first(n)
        lost = {path for node in expected for path in self.paths(node)}
        result = self.cache.evict_device(n)
        assert list(result.nodes) == expected
        assert set(result.pages.tolist()) == {self.model[path].device for path in lost}
        assert not lost & self.held()
        for path in lost:
            known = self.model[path]
            known.device = known.tenancy = None
            known.source = known.host_source
            if known.host is None:
                del self.model[path]

    def oldest_first(self, n: int) -> list[Node]:
        """Reference for the eviction order: a full scan per node."""
        held, chosen = self.held(), list[Node]()
        while sum(len(node.tokens) // PAGE for node in chosen) < n:
            left = [node for node in self.cache.nodes() if node.device_pages is not None and node not in chosen]
            parents = {node.parent for node in left}
            leaves = [node for node in left if node not in parents and self.path(node) not in held]
            if not leaves:
                break
            chosen.append(min(leaves, key=lambda node: (node.last_access, node.node_id)))
        return chosen

    @rule(n=st.integers(1, 8))
    def evict_host(self, n: int) -> None:
        available = self.cache.host_evictable_pages
        pages = set(self.cache.evict_host(n).tolist())
        lost = {path for path, page in self.model.items() if page.host in pages}
        assert len(lost) == len(pages)
        assert len(pages) >= min(n, available)
        assert all(self.model[path].device is None for path in lost)
        assert not lost & self.kept_on_host()
        for path in lost:
            del self.model[path]

    @invariant()
    def tree_and_dictionary_agree(self) -> None:
        self.cache.check_invariants()
        seen: set[Path] = set()
        for node in self.cache.nodes():
            for i, path in enumerate(self.paths(node)):
                known = self.model[path]
                assert known.device == (None if node.device_pages is None else node.device_pages[i])
                assert known.host == (None if node.host_pages is None else node.host_pages[i])
                assert known.source == node.sources[i]
                assert ("loading" in known.pins, "backing_up" in known.pins) == (node.loading, node.backing_up)
                seen.add(path)
        assert seen == self.model.keys()

    @invariant()
    def counters_agree(self) -> None:
        held = self.held()
        device = [path for path, page in self.model.items() if page.device is not None]
        host = [path for path, page in self.model.items() if page.host is not None]
        assert self.cache.device_pages_total == len(device)
        assert self.cache.host_pages_total == len(host)
        assert self.cache.device_evictable_pages == len([path for path in device if path not in held])
        host_only = [path for path in host if self.model[path].device is None]
        kept = self.kept_on_host()
        assert self.cache.host_evictable_pages == len([path for path in host_only if path not in kept])


AgainstADictionary.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAgainstADictionary = AgainstADictionary.TestCase


def broken(cache: RadixCache) -> Iterator[Callable[[], None]]:
    """Ways to break the tree by hand."""
    node = next(cache.nodes())

    def double_owner() -> None:
        insert(cache, "q", 0)

    def lock_below_zero() -> None:
        node.lock_ref = -1

    def odd_length() -> None:
        node.tokens = node.tokens[:-1]

    def wrong_counter() -> None:
        cache._device_evictable += 1

    def host_below_device_only() -> None:
        child = insert(cache, "abc", 10).last_node
        child.host_pages = page_ids([80])
        child._host_sources = child.sources

    yield from (double_owner, lock_below_zero, odd_length, wrong_counter, host_below_device_only)


@pytest.mark.parametrize("which", range(5))
def test_check_invariants_sees_a_broken_tree(which: int) -> None:
    cache = RadixCache(PAGE)
    insert(cache, "ab", 0)
    cache.check_invariants()
    list(broken(cache))[which]()
    with pytest.raises(AssertionError):
        cache.check_invariants()
