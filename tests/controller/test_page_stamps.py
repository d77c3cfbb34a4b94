"""The page fence waits for exactly what it must: a page, or a stream, left out of it is a race or was covered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hicache_obs.controller.fence_policy import PageFence
from hicache_obs.findings import Hazard
from hicache_obs.records import PageIds, Purpose, page_ids
from hicache_obs.streams.protocol import Stream

REQUESTS = 40
FENCES = 5
"""Load-backs that are looked at: the first ones that wait for anything."""


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

    def needs(self, page: int) -> bool:
        """Whether nothing but this page's stamp orders the load-back after that page's round."""
        rest = [ticket for other, ticket in self.tickets.items() if other != page]
        return self.tickets[page] > max(self.covered, *rest, 0)


@dataclass
class Leaky(PageFence):
    """The page fence, but for one page, or one stream, of one load-back."""

    at: int = -1
    page: int = -1
    stream: bool = False
    seen: list[Seen] = field(default_factory=list)
    covered: int = 0

    def fence(self, transfer_stream: Stream, fence_stream: Stream | None, pages: PageIds, purpose: Purpose) -> None:
        if purpose is not Purpose.LOAD_FENCE or fence_stream is None:
            super().fence(transfer_stream, fence_stream, pages, purpose)
            return
        tickets = {page: self._in_flight(page, fence_stream) for page in pages.tolist()}
        self.seen.append(Seen(len(self.seen), tickets, self.covered))
        self.covered = max(self.covered, *tickets.values())
        if len(self.seen) - 1 == self.at:
            pages = pages[:0] if self.stream else pages[pages != self.page]
        super().fence(transfer_stream, fence_stream, pages, purpose)

    def _in_flight(self, page: int, stream: Stream) -> int:
        ticket = self.allocator.last_uses(page_ids([page])).get(stream.stream_id, 0)
        return ticket if self.in_flight.event(stream.stream_id, ticket) is not None else 0


@pytest.fixture
def leaky(lab) -> Callable[..., tuple[list[Seen], list]]:
    """``leaky(at, page=…)`` or ``leaky(at, stream=True)``: the fences of a run, and its findings."""
    requests = lab.requests(REQUESTS)

    def run(at: int = -1, *, page: int = -1, stream: bool = False) -> tuple[list[Seen], list]:
        policies = []

        def prepare(engine):
            whole = engine.controller.policy
            policies.append(Leaky(whole.allocator, whole.in_flight, at=at, page=page, stream=stream))
            engine.controller.policy = policies[0]

        result = lab.run(requests, fence="page", backend="virtual-eager", prepare=prepare)
        return policies[0].seen, result.findings

    return run


@pytest.mark.slow
def test_any_stamp_left_out_is_a_race_or_was_covered(leaky):
    seen, findings = leaky()
    assert findings == []
    waiting = [fence for fence in seen if max(fence.tickets.values()) > fence.covered][:FENCES]
    assert len(waiting) >= 3, (len(seen), seen[:9])
    needed = covered = 0
    for fence in waiting:
        for page in fence.tickets:
            _, found = leaky(fence.number, page=page)
            raced = {raced for finding in found for raced in finding.pages}
            if fence.needs(page):
                needed += 1
                assert raced == {page}
                assert {f.hazard for f in found} <= {Hazard.WAR_FORWARD_RESTORE, Hazard.WAW_FORWARD_RESTORE}
            else:
                covered += 1
                assert not found
    assert needed
    assert covered


def test_the_reader_stream_left_out_is_a_race(leaky):
    seen, findings = leaky()
    assert findings == []
    fence = next(fence for fence in seen if max(fence.tickets.values()) > fence.covered)
    _, found = leaky(fence.number, stream=True)
    assert {page for finding in found for page in finding.pages} == {
        page for page, ticket in fence.tickets.items() if ticket > fence.covered
    }
