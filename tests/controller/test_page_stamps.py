"""The page fence waits for exactly what it must: a page, or a stream, left out of it is a race or was covered."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from hicache_obs.controller.engine import Engine
from hicache_obs.controller.fence_policy import PageFence
from hicache_obs.controller.workload_file import load_jsonl
from hicache_obs.controller.workloads import Request
from hicache_obs.findings import Finding, Hazard
from hicache_obs.records import Mode, PageIds, Purpose, page_ids
from hicache_obs.streams.protocol import Stream

PAGE_SIZE = 4
REQUESTS = 40
FENCES = 5
"""Load-backs that are looked at: the first ones that wait for anything."""
TRACE_REQUESTS = 150
TRACE_FENCES = int(os.environ.get("HICACHE_OBS_STAMPS", "1"))
RESTORE = {Hazard.WAR_FORWARD_RESTORE, Hazard.WAW_FORWARD_RESTORE}


@dataclass
class Seen:
    """One load-back.

    Attributes:
        number: Position among the fences of load-backs.
        tickets: By page: newest round in flight that uses it, 0 for none.
        covered: Newest round that the load-back stream had waited for before.
    """

    number: int
    tickets: dict[int, int]
    covered: int

    def needed(self, pages: frozenset[int]) -> set[int]:
        """Those of ``pages`` that nothing but the stamps of ``pages`` orders the transfer after the last round of."""
        rest = [ticket for other, ticket in self.tickets.items() if other not in pages]
        return {page for page in pages if self.tickets[page] > max(self.covered, *rest, 0)}

    def parts(self) -> list[frozenset[int]]:
        """What may be left out: any page, and all pages of the newest round, which cover each other."""
        newest = max(self.tickets.values())
        together = frozenset(page for page, ticket in self.tickets.items() if ticket == newest)
        return [*(frozenset([page]) for page in self.tickets), *([together] if len(together) > 1 else [])]


@dataclass
class Leaky(PageFence):
    """The page fence, but for some pages, or one stream, of one transfer.

    Attributes:
        purpose: Fences that are looked at: before load-backs, or before write-backs.
        key: Stream whose operations they wait for; default: that of the rounds.
        at, pages, stream: Number of the fence that leaks, the pages it leaves out, or whether it leaves out the stream.
    """

    purpose: Purpose = Purpose.LOAD_FENCE
    key: int | None = None
    at: int = -1
    pages: frozenset[int] = frozenset()
    stream: bool = False
    seen: list[Seen] = field(default_factory=list)
    covered: int = 0

    def fence(self, transfer_stream: Stream, fence_stream: Stream | None, pages: PageIds, purpose: Purpose) -> None:
        if purpose is not self.purpose or fence_stream is None:
            super().fence(transfer_stream, fence_stream, pages, purpose)
            return
        key = fence_stream.stream_id if self.key is None else self.key
        mode = Mode.WRITE if purpose is Purpose.LOAD_FENCE else Mode.READ
        tickets = {page: self._in_flight(page, key, mode) for page in pages.tolist()}
        self.seen.append(Seen(len(self.seen), tickets, self.covered))
        self.covered = max(self.covered, *tickets.values())
        leaks = len(self.seen) - 1 == self.at
        if leaks and not self.stream:
            pages = page_ids(page for page in pages.tolist() if page not in self.pages)
        for other, ticket in self.allocator.last_uses(pages, mode).items():
            event = self.in_flight.event(other, ticket)
            if (
                event is not None
                and other != transfer_stream.stream_id
                and not (leaks and self.stream and other == key)
            ):
                transfer_stream.wait_event(event, purpose=purpose)

    def _in_flight(self, page: int, key: int, mode: Mode) -> int:
        ticket = self.allocator.last_uses(page_ids([page]), mode).get(key, 0)
        return ticket if self.in_flight.event(key, ticket) is not None else 0


class Leaks:
    """Runs of one workload with a fence that leaks."""

    def __init__(self, lab: Any, requests: Sequence[Request], **setup: Any) -> None:
        self._lab = lab
        self._requests = requests
        self._setup = setup

    def __call__(
        self,
        at: int = -1,
        *,
        pages: frozenset[int] = frozenset(),
        stream: bool = False,
        purpose: Purpose = Purpose.LOAD_FENCE,
        moves: bool = False,
    ) -> tuple[list[Seen], list[Finding]]:
        """The fences of a run, and its findings; ``moves``: the fences' waits for moves are looked at."""
        policies = []

        def prepare(engine: Engine) -> None:
            whole = engine.controller.policy
            key = engine.compactor.stream.stream_id if moves and engine.compactor is not None else None
            policies.append(
                Leaky(whole.allocator, whole.in_flight, purpose=purpose, key=key, at=at, pages=pages, stream=stream)
            )
            engine.controller.policy = policies[0]

        setup = {"fence": "page", "backend": "virtual-eager", **self._setup}
        result = self._lab.run(self._requests, prepare=prepare, **setup)
        return policies[0].seen, result.findings


@pytest.fixture
def leaky(lab) -> Leaks:
    """A small run under pressure."""
    return Leaks(lab, lab.requests(REQUESTS))


def check_pages(leaky: Leaks, fences: int, hazards: set[Hazard], **which: Any) -> Counter[str]:
    """Leave out pages of the first ``fences`` fences that wait for anything; how often that mattered, and not."""
    seen, findings = leaky(**which)
    assert findings == []
    total: Counter[str] = Counter()
    for fence in [fence for fence in seen if max(fence.tickets.values()) > fence.covered][:fences]:
        total["fences"] += 1
        for pages in fence.parts():
            _, found = leaky(fence.number, pages=pages, **which)
            needed = fence.needed(pages)
            assert {raced for finding in found for raced in finding.pages} == needed
            assert {f.hazard for f in found} <= hazards
            total["needed" if needed else "covered"] += 1
    return total


@pytest.mark.slow
def test_any_stamp_left_out_is_a_race_or_was_covered(leaky):
    total = check_pages(leaky, FENCES, RESTORE)
    assert total["fences"] >= 3
    assert total["needed"]
    assert total["covered"]


def test_any_stamp_of_a_write_back_left_out_is_a_race_or_was_covered(lab):
    """Write-backs that are submitted at launch: nothing but their fence orders them after the round."""
    leaky = Leaks(lab, lab.requests(12), early_backup=True)
    total = check_pages(leaky, 2, {Hazard.RAW_FORWARD_BACKUP}, purpose=Purpose.WRITE_FENCE)
    assert total["fences"] == 2
    assert total["needed"] + total["covered"] >= 2


@pytest.mark.slow
def test_any_stamp_left_out_on_the_real_trace(lab, shared_data):
    """A block of the trace is a page here. ``HICACHE_OBS_STAMPS`` fences, each page of them."""
    path = shared_data / "data" / "mooncake_conversation_trace.jsonl"
    requests = load_jsonl(path, tokens_per_block=PAGE_SIZE, vocabulary=512, limit=TRACE_REQUESTS)
    leaky = Leaks(
        lab,
        requests,
        runner="blank",
        device_pages=512,
        host_pages=8192,
        max_running=32,
        max_extend_tokens=32 * PAGE_SIZE,
    )
    total = check_pages(leaky, TRACE_FENCES, RESTORE)
    assert total["fences"] == TRACE_FENCES
    assert total["needed"]


def check_stream(leaky: Leaks, **which: Any) -> None:
    seen, findings = leaky(**which)
    assert findings == []
    fence = next(fence for fence in seen if max(fence.tickets.values()) > fence.covered)
    _, found = leaky(fence.number, stream=True, **which)
    assert {page for finding in found for page in finding.pages} == {
        page for page, ticket in fence.tickets.items() if ticket > fence.covered
    }


def test_the_reader_stream_left_out_is_a_race(leaky):
    check_stream(leaky)


def test_the_writer_stream_left_out_of_a_write_back_is_a_race(lab):
    check_stream(Leaks(lab, lab.requests(12), early_backup=True), purpose=Purpose.WRITE_FENCE)


def test_the_stream_of_moves_left_out_is_a_race(lab):
    """A load-back into a page that a move has left: the round it could wait for instead may not be one of its own."""
    leaky = Leaks(lab, lab.requests(REQUESTS), compact_every=1)
    seen, findings = leaky(moves=True)
    assert findings == []
    waiting = [fence for fence in seen if max(fence.tickets.values()) > fence.covered]
    assert waiting
    raced = 0
    for fence in waiting[:FENCES]:
        _, found = leaky(fence.number, stream=True, moves=True)
        assert {f.hazard for f in found} <= {Hazard.RELOCATION}
        assert {page for f in found for page in f.pages} <= {page for page, ticket in fence.tickets.items() if ticket}
        raced += bool(found)
    assert raced
