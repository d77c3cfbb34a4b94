"""Everything a stream runs has one closed NVTX range, in the thread that runs it, and one event pair.

A compiled tool, injected as a profiler would be, counts the ranges; the engine's own launch counters say how many
there must be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Drive = Callable[..., Any]

POLICIES = [("threads", "stream"), ("virtual", "page")]


@pytest.fixture(scope="module", params=POLICIES, ids="-".join)
def policy(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Device and fence policy."""
    device, fence = request.param
    return device, fence


@pytest.fixture(scope="module", params=["domain API", "module API"])
def driven(request: pytest.FixtureRequest, drive: Drive, policy: tuple[str, str]) -> Any:
    """The demo under the tool, with the installed nvtx and with the last one that nsys 2022.4 can record."""
    nvtx = request.getfixturevalue("nvtx_0_2_11") if request.param == "module API" else None
    device, fence = policy
    return drive("--device", device, "--fence", fence, "--requests", "60", "--device-pages", "32", nvtx=nvtx)


def test_every_operation_has_exactly_one_closed_range_in_the_thread_that_runs_it(driven: Any) -> None:
    operations = Counter(tuple(operation) for run in driven.runs for operation in run["operations"])

    assert driven.ranges == operations
    assert {message for _, message, _ in operations} == {"segment", "copy", "wait_stream", "wait_event"}


def test_no_range_is_left_open_and_all_are_well_formed(driven: Any) -> None:
    summary = driven.summary

    assert [entry["opened"] - entry["closed"] for entry in summary["messages"].values()] == [0, 0, 0, 0]
    assert [entry["opened"] - entry["closed"] for entry in summary["threads"]] == [0] * len(summary["threads"])
    assert (summary["empty_pops"], summary["unregistered"], summary["without_payload"]) == (0, 0, 0)


def test_worker_threads_open_the_ranges(driven: Any, policy: tuple[str, str]) -> None:
    """On threads: index moves, rounds, load-backs and write-backs of two runs, none by the launching thread."""
    threads = {thread for thread, _, _ in driven.ranges}
    launching = {run["main_thread"] for run in driven.runs}

    if policy[0] == "threads":
        assert len(threads) == 2 * 4
        assert not threads & launching
    else:
        assert threads == launching


def test_counts_are_the_engines_own(driven: Any, policy: tuple[str, str]) -> None:
    total, stream_fences = driven.total, policy[1] == "stream"
    (mode,) = driven.modes
    transfers = total("load_backs") + total("write_backs")
    fences = len(driven.runs) * mode["fences"]  # which operations run does not depend on how fast
    layer_waits = sum(run["engine"]["layers"] * run["engine"]["load_backs"] for run in driven.runs)

    assert len(driven.runs) == 2
    assert total("load_backs") > 0
    assert total("write_backs") > 0
    assert fences == transfers if stream_fences else 0 < fences < transfers
    assert Counter(message for _, message, _ in driven.ranges.elements()) == {
        "segment": total("segments") + total("index_moves"),
        "copy": total("copies"),
        "wait_stream": total("rounds") + (fences if stream_fences else 0),
        "wait_event": transfers + layer_waits + (0 if stream_fences else fences),
    }


def test_every_operation_has_one_resolved_event_pair(driven: Any) -> None:
    for run in driven.runs:
        operations = [operation for _, _, operation in run["operations"]]
        recorder = run["recorder"]

        assert sorted(run["times"]) == sorted(operations)
        assert len(set(operations)) == len(operations) == recorder["pairs_resolved"]
        assert (recorder["pairs_dropped"], recorder["errors"]) == (0, 0)
