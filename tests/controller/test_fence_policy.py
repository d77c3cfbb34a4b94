"""Fence policies: which waits each issues for which pages, and what those waits cover."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.fence_policy import FENCE_POLICIES, InFlight, fence_policy
from hicache_obs.errors import ConfigError
from hicache_obs.records import Mode, Purpose, Work, page_ids
from hicache_obs.streams.protocol import Event, Stream


@dataclass
class Fences:
    """A policy, a forward stream ``F``, another one ``G`` and a transfer stream ``T`` on a recorded device."""

    observed: Any
    policy: str

    def __post_init__(self) -> None:
        self.device = self.observed.device
        self.streams: dict[str, Stream] = {name: self.device.Stream(name) for name in "FGT"}
        self.allocator = PageAllocator(16, name="device")
        self.in_flight = InFlight()
        self.fences = fence_policy(self.policy, self.allocator, self.in_flight)
        self.ran: list[str] = []
        self.events: dict[str, Event] = {}

    def launch(self, name: str, *pages: int, reads: bool = False) -> None:
        """Launch operation ``name``, its stream's letter and its ticket; it writes ``pages``, or only reads them."""
        stream, ticket = self.streams[name[0]], int(name[1:])
        with self.device.stream(stream):
            self.device.launch(lambda: self.ran.append(name), Work("op"))
        self.events[name] = stream.record_event()
        self.in_flight.launched(stream, ticket, self.events[name])
        mode = Mode.READ if reads else Mode.WRITE
        self.allocator.stamp(page_ids(pages), stream.stream_id, ticket, mode=mode)

    def complete(self, name: str) -> None:
        """The host learns that operation ``name`` is complete."""
        self.events[name].synchronize()
        self.in_flight.completed(self.streams[name[0]], int(name[1:]))

    def fence(self, *pages: int, stream: str | None = "F", purpose: Purpose = Purpose.LOAD_FENCE) -> list[str]:
        """Calls of one fence in front of a transfer of ``pages``."""
        before = len(self.observed.records)
        on = None if stream is None else self.streams[stream]
        self.fences.fence(self.streams["T"], on, page_ids(pages), purpose)
        return self.observed.calls(before)

    def behind(self) -> set[str]:
        """Operations that the transfer stream now waits for, and that had not run before."""
        before = set(self.ran)
        self.streams["T"].synchronize()
        return set(self.ran) - before


@pytest.fixture
def make(lab):
    """``make(policy)``; on the lazy schedule nothing runs but what something waits for."""
    return lambda policy: Fences(lab.observed("virtual-lazy"), policy)


WAIT = "T: wait event (load_fence)"


def test_none_waits_for_nothing(make):
    bench = make("none")
    bench.launch("F1", 3)
    assert bench.fence(3) == []
    assert bench.behind() == set()


def test_stream_waits_for_everything_queued_whatever_the_pages(make):
    bench = make("stream")
    bench.launch("F1", 3)
    bench.launch("F2", 4)
    assert bench.fence(9) == ["T: wait for F (load_fence)"]
    bench.launch("F3", 9)
    assert bench.behind() == {"F1", "F2"}


def test_stream_does_nothing_without_a_stream(make):
    bench = make("stream")
    bench.launch("F1", 3)
    assert bench.fence(3, stream=None) == []


@pytest.mark.parametrize("purpose", [Purpose.LOAD_FENCE, Purpose.WRITE_FENCE])
@pytest.mark.parametrize("policy", ["stream", "page"])
def test_waits_are_issued_with_their_purpose(make, policy, purpose):
    bench = make(policy)
    bench.launch("F1", 3)
    (call,) = bench.fence(3, purpose=purpose)
    assert call.endswith(f"({purpose.name.lower()})")


@pytest.mark.parametrize(
    ("pages", "covered"),
    [
        pytest.param([9], set(), id="nothing in flight uses the page"),
        pytest.param([3], {"F1"}, id="one user, not the newest operation"),
        pytest.param([4], {"F1", "F2"}, id="two users: the newer, and what is before it"),
        pytest.param([3, 9], {"F1"}, id="one page used, one not"),
        pytest.param([3, 5], {"F1", "F2", "F3"}, id="the newest of several"),
        pytest.param([], set(), id="no pages"),
    ],
)
def test_page_waits_for_exactly_the_last_user_of_the_pages(make, pages, covered):
    bench = make("page")
    bench.launch("F1", 3, 4)
    bench.launch("F2", 4)
    bench.launch("F3", 5)
    assert bench.fence(*pages) == ([WAIT] if covered else [])
    assert bench.behind() == covered


@pytest.mark.parametrize(
    ("purpose", "pages", "covered"),
    [
        pytest.param(Purpose.LOAD_FENCE, [3], {"F1", "F2"}, id="a load-back writes: readers count"),
        pytest.param(Purpose.WRITE_FENCE, [3], {"F1"}, id="a write-back reads: writers only"),
        pytest.param(Purpose.LOAD_FENCE, [5], {"F1", "F2", "F3"}, id="a load-back into a page that is only read"),
        pytest.param(Purpose.WRITE_FENCE, [5], set(), id="a write-back of a page that is only read"),
        pytest.param(Purpose.WRITE_FENCE, [3, 5, 4], {"F1", "F2", "F3", "F4"}, id="a writer among the readers"),
    ],
)
def test_page_waits_for_what_conflicts(make, purpose, pages, covered):
    bench = make("page")
    bench.launch("F1", 3)
    bench.launch("F2", 3, reads=True)
    bench.launch("F3", 5, reads=True)
    bench.launch("F4", 4)
    assert len(bench.fence(*pages, purpose=purpose)) == bool(covered)
    assert bench.behind() == covered


def test_page_ignores_what_the_host_knows_to_be_complete(make):
    bench = make("page")
    bench.launch("F1", 3)
    bench.launch("F2", 4)
    bench.complete("F1")
    assert bench.fence(3) == []
    assert bench.fence(4) == [WAIT]
    bench.complete("F2")
    assert bench.fence(3, 4) == []


def test_page_knows_that_what_is_before_a_complete_operation_is_complete_too(make):
    bench = make("page")
    bench.launch("F1", 3)
    bench.launch("F2", 4)
    bench.complete("F2")
    assert bench.fence(3, 4) == []


def test_page_takes_a_later_event_where_an_operation_left_none(make):
    """A stamp without an event of its own (two tickets per round, say) is covered by the next one on its stream."""
    bench = make("page")
    bench.allocator.stamp(page_ids([3]), bench.streams["F"].stream_id, 1)
    bench.launch("F2", 4)
    bench.launch("F3", 5)
    assert bench.fence(3) == [WAIT]
    assert bench.behind() == {"F2"}


def test_page_waits_per_stream_for_every_stream_that_used_the_pages(make):
    bench = make("page")
    bench.launch("F1", 3)
    bench.launch("G2", 3, 4)
    bench.launch("F3", 5)
    assert bench.fence(3) == [WAIT, WAIT]
    assert bench.behind() == {"F1", "G2"}


@pytest.mark.parametrize(("policy", "covered"), [("page", {"F1"}), ("stream", {"G2"})])
def test_after_the_forward_stream_was_replaced(make, policy, covered):
    """Stamps name the stream that really ran the round; ``stream`` relies on the new one waiting for the old."""
    bench = make(policy)
    bench.launch("F1", 3)
    bench.launch("G2", 4)
    assert len(bench.fence(3, stream="G")) == 1
    assert bench.behind() == covered


def test_page_does_not_let_a_stream_wait_for_itself(make):
    bench = make("page")
    bench.launch("T1", 3)
    assert bench.fence(3) == []


def test_page_does_not_need_the_fence_stream(make):
    bench = make("page")
    bench.launch("F1", 3)
    assert bench.fence(3, stream=None) == [WAIT]


def test_the_fence_covers_what_was_launched_before_it_only(make):
    bench = make("page")
    bench.launch("F1", 3)
    bench.fence(3)
    bench.launch("F2", 3)
    assert bench.behind() == {"F1"}


def test_in_flight_forgets_what_is_complete(make):
    bench = make("page")
    for ticket in range(1, 50):
        bench.launch(f"F{ticket}", 3)
        if ticket > 2:
            bench.complete(f"F{ticket - 2}")
    assert sum(map(len, bench.in_flight._events.values())) == 2


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError) as refused:
        fence_policy("layer", PageAllocator(1, name="device"), InFlight())
    assert str(refused.value) == "--fence layer: unknown policy; expected one of none, stream, page"


@pytest.mark.parametrize("name", FENCE_POLICIES)
def test_policies_are_named_as_asked_for(name):
    assert fence_policy(name, PageAllocator(1, name="device"), InFlight()).name == name


RACES = {
    # launched before the transfer of page 3: hazards of a load-back into it, of a write-back from it
    "write": (["w3"], "waw_forward_restore", "raw_forward_backup"),
    "read": (["r3"], "war_forward_restore", None),
    "older write": (["w3", "w4"], "waw_forward_restore", "raw_forward_backup"),
    "older read": (["r3", "w4"], "war_forward_restore", None),
    "read after write": (["w3", "r3"], "waw_forward_restore war_forward_restore", "raw_forward_backup"),
    "other pages": (["w4", "r5"], None, None),
    "complete": (["w3", "sync"], None, None),
}


def launch_all(tiers, rounds: list[str]) -> None:
    for step in rounds:
        if step == "sync":
            tiers.settle()
        else:
            tiers.forward(**{"write" if step[0] == "w" else "read": [int(step[1])]}, value=55.0)


def outcome(tiers, before: int) -> tuple[int, set[str]]:
    """Fences issued since record ``before``, and the hazards found."""
    fences = [call for call in tiers.observed.calls(before) if "_fence)" in call]
    tiers.device.synchronize()
    return len(fences), {finding.hazard.value for finding in tiers.observed.analyse().findings}


@pytest.mark.parametrize("case", RACES)
@pytest.mark.parametrize("policy", FENCE_POLICIES)
def test_load_backs_under_each_policy(lab, policy, case):
    """The page fence prevents what the stream fence does, and waits only where there is something to wait for."""
    rounds, hazards, _ = RACES[case]
    expected = set(hazards.split()) if hazards else set()
    tiers = lab.tiers(policy)
    node = tiers.host_only(1, first_token=100)
    taken = tiers.device_pages.alloc(8)  # page 3 among them, and the next to be handed out
    launch_all(tiers, rounds)
    tiers.device_pages.free(taken[taken == 3])
    assert tiers.load(node).tolist() == [3]
    before = len(tiers.observed.records)
    tiers.controller.start_loading(1)
    fences, found = outcome(tiers, before)
    assert fences == {"none": 0, "stream": 1, "page": int(bool(expected))}[policy]
    assert found == (expected if policy == "none" else set())
    spoiled = policy == "none" and "waw_forward_restore" in expected
    assert tiers.contents([3]) == ([[55.0], [56.0], [57.0]] if spoiled else [[100.0], [101.0], [102.0]])


@pytest.mark.parametrize("case", RACES)
@pytest.mark.parametrize("policy", FENCE_POLICIES)
def test_write_backs_under_each_policy(lab, policy, case):
    rounds, _, hazard = RACES[case]
    tiers = lab.tiers(policy)
    pages = tiers.device_pages.alloc(8)
    launch_all(tiers, rounds)
    node = tiers.radix.insert(np.arange(4), *[pages[pages == 3]] * 3).last_node
    tiers.controller.write(node, tiers.host_pages.alloc(1))
    before = len(tiers.observed.records)
    tiers.controller.start_writing(1)
    fences, found = outcome(tiers, before)
    assert fences == {"none": 0, "stream": 1, "page": int(hazard is not None)}[policy]
    assert found == ({hazard} if policy == "none" and hazard else set())
    written = any(step == "w3" for step in rounds)
    spoiled = policy == "none" and hazard is not None
    copied = tiers.host.k[:, node.host_pages].flatten(1)[:, 0].tolist()
    assert (copied == [55.0, 56.0, 57.0]) == (written and not spoiled)
