"""From a number in Prometheus to its trace: exemplars that were scraped and stored name spans that were received."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow


def spans_of(recording: Any, exemplar: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The span that an exemplar names, and its whole trace."""
    trace = bytes.fromhex(exemplar["labels"]["trace_id"])
    whole = [span for span in recording.receiver.spans if span.trace_id == trace]
    (span,) = [span for span in whole if span.span_id.hex() == exemplar["labels"]["span_id"]]
    return span, whole


def attributes(of: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}


def traced(recording: Any, selector: str, period: Any) -> list[dict[str, Any]]:
    return [one for one in recording.exemplars(selector, period) if "trace_id" in one["labels"]]


def test_a_violation_leads_to_its_trace(recording: Any) -> None:
    """The span has the finding at a nanosecond, links to what it conflicts with, and its round to its requests."""
    found = traced(recording, f'hicache_obs_violations_total{{instance="{recording.instance}"}}', recording.racy)

    assert found
    for exemplar in found:
        span, whole = spans_of(recording, exemplar)
        fingerprints = {attributes(event)["hicache.fingerprint"] for event in span.events}
        links = {attributes(link)["hicache.link"] for one in recording.receiver.spans for link in one.links}
        assert exemplar["labels"]["fingerprint"] in fingerprints
        assert span.status.code == 2
        assert "conflict" in {attributes(link)["hicache.link"] for link in span.links}
        assert {"request", "conflict"} <= links
        assert recording.racy.start < span.start_time_unix_nano / 1e9 < span.end_time_unix_nano / 1e9
        assert span.end_time_unix_nano / 1e9 < recording.racy.end
        assert len({one.trace_id for one in whole}) == 1


def test_a_fence_wait_leads_to_the_span_that_waited_so_long(recording: Any) -> None:
    selector = f'hicache_obs_fence_wait_seconds_bucket{{instance="{recording.instance}",op="restore"}}'
    found = traced(recording, selector, recording.safe)

    assert found
    for exemplar in found:
        span, whole = spans_of(recording, exemplar)
        assert span.name == "hicache.fence_wait"
        assert attributes(span)["hicache.waited_ns"] == round(float(exemplar["value"]) * 1e9)
        assert {one.span_id for one in whole if one.name == "hicache.restore"} >= {span.parent_span_id}


def test_times_are_whole_nanoseconds(recording: Any) -> None:
    """Not microseconds with three zeros, as some tracing backends keep them."""
    starts = [span.start_time_unix_nano for span in recording.receiver.named("hicache.forward_round")]

    assert len(starts) > 10
    assert sum(start % 1000 == 0 for start in starts) < len(starts) / 2
