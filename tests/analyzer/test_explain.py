"""Findings in words: exact text, from the data alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hicache_obs.analyzer import Analyzer, explain
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.records import OpId, ThreadId, Times
from hicache_obs.testing import History, RecordingSink


def text_of(history: str, times: dict[int, tuple[int, int]] | None = None) -> str:
    """The explanation of the only finding."""
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(History(history).records)
    analyzer.feed(Times(OpId(op), ThreadId(0), 0, *span) for op, span in (times or {}).items())
    analyzer.finish()
    (finding,) = sink.findings
    return explain(finding)


def test_a_missing_fence_that_struck() -> None:
    """The whole text."""
    assert text_of("F:w4,5,6,9 L:w5,6,7,9@2", {0: (5000, 9000), 1: (2000, 4500)}) == (
        "HC-5b1dfeed  VIOLATION  waw_forward_restore\n"
        "\n"
        "A load-back restored pages that an already launched forward round was still going to write. "
        "Whichever comes last wins: if the round does, the restored prefix is silently wrong.\n"
        "\n"
        "  device pages 5-6, 9, layer 2\n"
        "  earlier  forward round 0 writes them on stream 'F', op 0 (F work), ran from 3.0 to 7.0 us\n"
        "  later    restore transfer 1 writes them on stream 'L', op 1 (L work), layer 2, ran from 0.0 to 2.5 us\n"
        "  measured reversed: the later operation was over 0.5 us before the earlier one began\n"
        "  proof    nothing makes 'L' wait for 'F' up to op 0 before op 1\n"
        "  fix      before op 1 is issued: L.wait_stream(F), or wait for an event recorded after op 0"
    )


def test_what_was_measured() -> None:
    """Overlap, kept, and not measured read differently."""
    assert "overlap: the later operation began 3.5 us before" in text_of("F:w5 L:w5", {0: (0, 9000), 1: (5500, 9900)})
    assert "this time the order was kept" in text_of("F:w5 L:w5", {0: (0, 900), 1: (5500, 9900)})
    assert "no device times for this pair" in text_of("F:w5 L:w5")


def test_why_the_waits_that_exist_do_not_help() -> None:
    """Each cause has its sentence and its fix."""
    wrong = text_of("F:w5 X<<F L:w5")
    assert "a fence that covers op 0 was put on 'X', but op 2 ran on 'L'" in wrong
    assert "put the fence on 'L', the stream that runs op 2" in wrong
    assert "a wait for 'F', on an event recorded too early to cover op 1" in text_of("e=F F:w5 L<e L:w5")
    assert "an event that had never been recorded" in text_of("F:w5 L<e L:w5")
    assert "recorded again elsewhere before the wait" in text_of("F:w5 e=F e=S L<e L:w5")
    assert "records were lost between the two" in text_of("F:w5 ~3 L:w5")


def test_a_contradiction_blames_no_fence_blindly() -> None:
    """Proven ordered, measured broken."""
    text = text_of("F:w5 L<F L:w5", {0: (0, 9000), 2: (5000, 6000)})

    assert "CONTRADICTION" in text
    assert "a fence is not where we think, or a clock lies" in text


def test_names_from_the_trace_appear_as_they_are() -> None:
    """Host pages are named as such."""
    assert "host page 3" in text_of("B:r7W3 L:R3w9")


@pytest.mark.parametrize(
    ("keys", "named", "numbered"),
    [
        ({"writes": ["draft:5", "draft:6"]}, "device pages 5-6 of pool 'draft'", "device pages 5-6 of pool '1'"),
        ({"writes": [5]}, "device page 5", "device page 5"),
        ({"writes_buf": ["table", "meta"]}, "buffers 'table', 'meta'", "buffers 0-1"),
        ({"writes": [5], "writes_host": [3]}, "device page 5, and host page 3", "device page 5, and host page 3"),
    ],
)
def test_what_both_touch_is_named(keys: dict[str, Any], named: str, numbered: str) -> None:
    """Page 5 of another pool is another page; all that the two share is told."""
    steps = [{"id": stream, "op": "kernel", "stream": stream, **keys} for stream in ("a", "b")]
    trace = parse_scenario(json.dumps({"steps": steps}).encode(), source="x.json")
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(trace)
    analyzer.finish()
    (finding,) = sink.findings
    assert f"\n  {named}\n" in explain(finding, names=trace.names)
    assert f"\n  {numbered}\n" in explain(finding)
