"""A journal and a profile of one run become one trace; recordings that do not belong together are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.errors import TraceError
from hicache_obs.readers.join import join
from hicache_obs.readers.nsys import read_nsys
from hicache_obs.readers.profile import Profile
from hicache_obs.records import Define, DefineSpace, OpId, Times
from hicache_obs.testing import History
from hicache_obs.testing.nsys_writer import GENERATIONS, nsys_tables, write_nsys
from hicache_obs.testing.profiled import Seen, SeenCall, SeenRange, profiled
from hicache_obs.trace import Trace, make_trace

TEXT = "F:w1 e=F L<e L:w1 F:r1 F:w2 L:w2"


def seen_of(text: str = TEXT, **options: Any) -> Seen:
    """What a profiler sees of a history."""
    return profiled(History(text).records, **{"seed": 5, "threads": 1, **options})


def profile_of(tmp_path: Path, *seen: Seen) -> Profile:
    """An export of these processes."""
    return read_nsys(write_nsys(tmp_path / "export.sqlite", nsys_tables(seen, GENERATIONS["2025.1"])))


def journal_of(seen: Seen) -> Trace:
    """The history without device times."""
    return make_trace("journal", seen.history)


def times(trace: Trace) -> dict[OpId, tuple[int, int]]:
    """Device times of a trace."""
    return {record.op: (record.start_ns, record.end_ns) for record in trace if isinstance(record, Times)}


def test_times_are_the_device_operations(tmp_path: Path) -> None:
    seen = seen_of()

    trace, coverage = join(journal_of(seen), profile_of(tmp_path, seen))

    found = times(trace)
    (shift,) = {found[op][0] - start for op, (start, _) in seen.times.items()}
    assert found == {op: (start + shift, end + shift) for op, (start, end) in seen.times.items()}
    assert (coverage.operations, coverage.timed, coverage.from_ranges, coverage.process) == (5, 5, False, 4242)


def test_the_journals_own_times_are_not_believed(tmp_path: Path) -> None:
    seen = seen_of()
    (tmp_path / "again").mkdir()
    lying = make_trace("journal", [*seen.history, Times(OpId(0), seen.history[-1].thread, 2, 1, 2)])

    assert times(join(lying, profile_of(tmp_path, seen))[0]) == times(
        join(journal_of(seen), profile_of(tmp_path / "again", seen))[0]
    )


def test_an_operation_with_a_launch_that_left_no_row_has_no_times(tmp_path: Path) -> None:
    seen = seen_of()
    first = seen.ranges[0]
    extra = SeenCall(99, "cudaLaunchKernel", 0, first.start_ns + 100, first.start_ns + 200)
    with_extra = replace(seen, calls=[extra, *seen.calls])

    trace, coverage = join(journal_of(seen), profile_of(tmp_path, with_extra))

    assert coverage.timed == 4
    assert OpId(first.op) not in times(trace)


def test_of_two_processes_the_one_that_fits_is_taken(tmp_path: Path) -> None:
    """Both number their operations from 0."""
    one, other = seen_of(process=11), seen_of(process=12, seed=9, start_ns=2_000_000_000)
    profile = profile_of(tmp_path, one, other)

    for seen in (one, other):
        trace, coverage = join(journal_of(seen), profile)
        assert coverage.process == seen.process
        durations = {op: end - start for op, (start, end) in seen.times.items()}
        assert {op: end - start for op, (start, end) in times(trace).items()} == durations


def test_two_processes_that_fit_alike_are_refused(tmp_path: Path) -> None:
    one, other = seen_of(process=11), seen_of(process=12)

    with pytest.raises(TraceError, match=r"processes 11, 12 have ranges .* cannot be told"):
        join(journal_of(one), profile_of(tmp_path, one, other))


def test_another_run_is_refused(tmp_path: Path) -> None:
    other = seen_of("F:w1 " * 12).history[-2:]

    with pytest.raises(TraceError, match="none of the 2 operations of journal is in it"):
        join(make_trace("journal", other), profile_of(tmp_path, seen_of()))


def test_an_id_in_two_ranges_of_one_process_is_refused(tmp_path: Path) -> None:
    seen = seen_of()
    twice = replace(seen, ranges=[*seen.ranges, SeenRange(0, 5, 6, seen.ranges[0].op)])

    with pytest.raises(TraceError, match="operation id 0 is in two ranges of process 4242"):
        join(journal_of(seen), profile_of(tmp_path, twice))


def on_threads(seen: Seen, thread_of: Sequence[int]) -> Seen:
    """No device operations; the ranges are in these threads and last as long as the operations."""
    ranges = [
        SeenRange(thread, *seen.times[OpId(mark.op)], mark.op)
        for mark, thread in zip(seen.ranges, thread_of, strict=True)
    ]
    return replace(seen, ops=[], ranges=ranges)


def test_ranges_in_the_threads_that_are_the_streams_are_the_operations(tmp_path: Path) -> None:
    seen = seen_of()
    streams = [1, 2, 1, 1, 2]  # F L F F L

    trace, coverage = join(journal_of(seen), profile_of(tmp_path, on_threads(seen, streams)))

    assert coverage.from_ranges
    assert {op: end - start for op, (start, end) in times(trace).items()} == {
        op: end - start for op, (start, end) in seen.times.items()
    }


@pytest.mark.parametrize("threads", [[0, 0, 0, 0, 0], [1, 2, 1, 2, 2]], ids=["launching thread", "mixed"])
def test_ranges_around_launches_are_no_device_times(tmp_path: Path, threads: list[int]) -> None:
    seen = seen_of()

    with pytest.raises(TraceError, match="its ranges are around launches"):
        join(journal_of(seen), profile_of(tmp_path, on_threads(seen, threads)))


def test_a_kernel_that_began_before_its_predecessor_had_ended_is_marked(tmp_path: Path) -> None:
    """Its stream's order is then unknown, as with every early launch; kernels that waited are not marked."""
    seen = seen_of("F:w1 F:r1 L:r9")
    early = replace(seen.ops[1], start_ns=seen.ops[0].end_ns - 2_000)
    profile = profile_of(tmp_path, replace(seen, ops=[seen.ops[0], early, *seen.ops[2:]]))

    def marks(trace: Trace) -> list[str]:
        return [r.text for r in trace if isinstance(r, Define) and r.space is DefineSpace.EARLY_SITE]

    assert marks(join(journal_of(seen), profile)[0]) == ["F work"]
    (tmp_path / "whole").mkdir()
    assert marks(join(journal_of(seen), profile_of(tmp_path / "whole", seen))[0]) == []
