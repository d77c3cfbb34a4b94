"""A finished span as this package hands it on: plain data on the wall clock, no OpenTelemetry object yet."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from hicache_obs._struct import Struct

FORWARD_ROUND: Final = "hicache.forward_round"
RESTORE: Final = "hicache.restore"
FENCE_WAIT: Final = "hicache.fence_wait"
TRANSFER: Final = "hicache.transfer"
LAYER_WAIT: Final = "hicache.layer_wait"
BACKUP: Final = "hicache.backup"
ORDERING_FINDING: Final = "hicache.ordering_finding"
"""Name of the event on the spans of both accesses of a finding."""

Attribute = str | bool | int | tuple[int, ...]
Attributes = dict[str, Attribute]
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


class SpanId(NamedTuple):
    """Where a span is: both numbers are above 0, of 128 and 64 bits."""

    trace: int
    span: int


class Link(NamedTuple):
    """Another span that this one has to do with, and what: ``request``, ``writer`` or ``conflict``."""

    to: SpanId
    what: str


class Event(NamedTuple):
    """Something at one moment of a span, wall clock nanoseconds."""

    name: str
    time_ns: int
    attributes: Attributes


class Observation(NamedTuple):
    """One value of a histogram of the catalogue that a span explains: what an exemplar is made of."""

    metric: str
    labels: tuple[str, ...]
    value_ns: int


class Span(Struct, eq=False):
    """One finished span.

    Attributes:
        name: One of this module's names.
        id: Its own.
        parent: Span id of its parent in the same trace, 0 without one.
        start_ns, end_ns: Unix time, nanoseconds, from device times where the operation was measured.
        failed: It holds an access of a violation or a contradiction.
        kept: Its trace has a finding: it is the last to be dropped.
        observation: What it is an exemplar of.
    """

    name: str
    id: SpanId
    parent: int
    start_ns: int
    end_ns: int
    attributes: Attributes
    links: tuple[Link, ...] = ()
    events: tuple[Event, ...] = ()
    failed: bool = False
    kept: bool = False
    observation: Observation | None = None


def parse_traceparent(text: str) -> SpanId | None:
    """The span that a W3C ``traceparent`` names, ``None`` if it is none.

    Source: https://www.w3.org/TR/trace-context/#traceparent-header (ids of zeros and version ff are invalid).
    """
    match = _TRACEPARENT.match(text)
    if match is None:
        return None
    found = SpanId(int(match[1], 16), int(match[2], 16))
    return found if all(found) else None
