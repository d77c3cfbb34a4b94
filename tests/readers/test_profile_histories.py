"""Profiles written from known histories are judged like the histories; with rows lost, never otherwise than *unknown*.

Every version of both formats, over random histories. What is compared: the verdict of every pair of operations.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.cli.judge import check_copies
from hicache_obs.findings import Verdict
from hicache_obs.readers.join import join
from hicache_obs.readers.kineto import read_kineto
from hicache_obs.readers.nsys import read_nsys
from hicache_obs.readers.preflight import Level, blind_spots, count_syncs, level
from hicache_obs.readers.profile import Profile
from hicache_obs.readers.profile_records import processes, profile_trace
from hicache_obs.records import (
    ALL_LAYERS,
    Access,
    AnyRecord,
    GraphReplay,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    Relocate,
    Space,
    StreamId,
    ThreadId,
    page_ids,
)
from hicache_obs.testing import RecordingSink, races
from hicache_obs.testing.kineto_writer import FORMATS, write_kineto
from hicache_obs.testing.nsys_writer import GENERATIONS, nsys_tables, write_nsys, write_nsys_folder
from hicache_obs.testing.profiled import PROFILED, Seen, profiled
from hicache_obs.testing.programs import random_program
from hicache_obs.trace import make_trace

PROGRAMS = int(os.environ.get("HICACHE_OBS_FUZZ_PROFILES", "15"))
EPOCH_NS = 1_700_000_000_000_000_000
WORK = (Kernel, Memcpy, Relocate, GraphReplay)
Verdicts = dict[tuple[int, int], Verdict]
LOSSY_TABLES = {
    "records": "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
    "syncs": "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
    "calls": "CUPTI_ACTIVITY_KIND_RUNTIME",
    "ops": "CUPTI_ACTIVITY_KIND_KERNEL and the like",
}


def programs(count: int, *, steps: int = 40, **options: Any) -> Iterator[Seen]:
    """What a profiler saw of random histories that have some work."""
    found = 0
    for seed in itertools.count():
        seen = profiled(random_program(seed, steps=steps), seed=seed, **options)
        if len(seen.ops) < 2:
            continue
        yield seen
        found += 1
        if found == count:
            return


def judged(records: Sequence[AnyRecord]) -> tuple[Verdicts, set[tuple[int, int]]]:
    """Verdict of every pair that is not proven ordered, and the pairs that only a poll orders."""
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    assert not sink.misuses
    return {(f.earlier.op, f.later.op): f.verdict for f in sink.findings}, set(sink.weak_pairs)


def from_profile(profile: Profile, seen: Seen) -> tuple[Verdicts, set[tuple[int, int]]]:
    """The same from the profile's order and times, with the history's page sets and operation ids."""
    work = {record.op: record for record in seen.history if isinstance(record, WORK)}
    pages, op_of = {}, {}
    for row, (correlation, stream) in enumerate(zip(profile.ops.correlation.tolist(), profile.ops.stream, strict=True)):
        if profile.streams[stream].process == seen.process:
            op_of[row] = seen.op_of[correlation]
            record = work[op_of[row]]
            pages[row] = record.accesses, record.layers
    trace = profile_trace(profile, pages, process=seen.process)
    verdicts, weak = judged(trace.records)
    return (
        {(op_of[a], op_of[b]): verdict for (a, b), verdict in verdicts.items()},
        {(op_of[a], op_of[b]) for a, b in weak},
    )


def graphs_on_one_stream(seen: Seen) -> bool:
    """Whether all graph replays of a history are on one stream."""
    return len({record.stream for record in seen.history if isinstance(record, GraphReplay)}) < 2


def wrong(found: tuple[Verdicts, set[Any]], true: tuple[Verdicts, set[Any]], missing: set[int]) -> list[Any]:
    """Pairs of which the profile says something else than the history, *unknown* excepted.

    ``missing`` are operations that left no row: nothing can be said of them.
    """
    (verdicts, weak), (truth, polled) = found, true
    bad: list[Any] = [
        (pair, verdict, truth.get(pair))
        for pair, verdict in verdicts.items()
        if verdict is not Verdict.UNKNOWN and verdict is not truth.get(pair)
    ]
    bad += [
        (pair, "ordered", verdict) for pair, verdict in truth.items() if pair not in verdicts and not {*pair} & missing
    ]
    bad += [
        (pair, "ordered", "polled")
        for pair in polled
        if pair not in weak and pair not in verdicts and not {*pair} & missing
    ]
    return bad


def lossy(seen: Seen, rng: random.Random, kind: str) -> Seen:
    """``seen`` without up to three rows of one kind."""
    rows = getattr(seen, kind)
    return seen.without(**{kind: rng.sample(rows, min(len(rows), rng.randint(1, 3)))})


def read_export(tmp_path: Path, seen: Sequence[Seen], generation: str, **options: Any) -> Profile:
    """The profile of an export written for ``seen``."""
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.sqlite"
    return read_nsys(write_nsys(path, nsys_tables(seen, GENERATIONS[generation], **options)))


def read_trace(tmp_path: Path, seen: Seen, style: str) -> Profile:
    """The profile of a torch.profiler trace written for ``seen``."""
    return read_kineto(write_kineto(tmp_path / f"{len(list(tmp_path.iterdir()))}.json", seen, FORMATS[style]))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_nsys_generation_gives_the_verdicts_of_the_history(tmp_path: Path, generation: str) -> None:
    total = 0
    for seen in programs(PROGRAMS, threads=1):
        profile = read_export(tmp_path, [seen], generation)

        truth, found = judged(seen.timed(profile.facts.error_ns)), from_profile(profile, seen)
        if graphs_on_one_stream(seen):
            assert found == truth
            total += len(truth[0])
        else:  # replays of one graph follow each other, but no file says which graph it is
            assert wrong(found, truth, set()) == []

    assert total > PROGRAMS


@pytest.mark.parametrize("style", FORMATS)
def test_every_kineto_format_gives_the_verdicts_of_the_history_or_unknown(tmp_path: Path, style: str) -> None:
    same = total = 0
    for seen in programs(PROGRAMS, threads=1, kinds=False, start_ns=EPOCH_NS):
        profile = read_trace(tmp_path, seen, style)

        truth, found = judged(seen.timed(profile.facts.error_ns)), from_profile(profile, seen)
        assert wrong(found, truth, set()) == []
        total += len(truth[0])
        same += sum(found[0].get(pair) is verdict for pair, verdict in truth[0].items())

    assert total > PROGRAMS
    # A query's answer is in no trace, and nor is any wait in those without pairs: what is left is still a good part.
    assert same > total // (3 if FORMATS[style].pairs in ("all", "latest") and FORMATS[style].sync else 20)


def test_a_kineto_trace_without_queries_gives_the_verdicts_of_the_history(tmp_path: Path) -> None:
    compared = 0
    for seen in programs(4 * PROGRAMS, threads=1, kinds=False, start_ns=EPOCH_NS):
        working = {op.stream for op in seen.ops}
        if not graphs_on_one_stream(seen) or any(
            s.name == "cudaEventQuery" or (s.stream not in working and s.stream is not None) for s in seen.syncs
        ):
            continue  # such a wait leaves no row
        profile = read_trace(tmp_path, seen, "2025")

        assert from_profile(profile, seen) == judged(seen.timed(profile.facts.error_ns))
        compared += 1

    assert compared > PROGRAMS // 2


@pytest.mark.parametrize("kind", LOSSY_TABLES)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_lost_rows_of_an_export_make_nothing_but_unknown(tmp_path: Path, generation: str, kind: str) -> None:
    unknown = 0
    for number, seen in enumerate(programs(PROGRAMS, threads=1)):
        lost = lossy(seen, random.Random(number), kind)
        profile = read_export(tmp_path, [lost], generation)

        found, truth = from_profile(profile, seen), judged(seen.timed(profile.facts.error_ns))
        missing = {int(seen.op_of[op.correlation]) for op in seen.ops if op not in lost.ops}
        assert wrong(found, truth, missing) == []
        if missing - {int(seen.op_of[op.correlation]) for op in lost.ops}:
            assert blind_spots(profile)
            assert check_copies(profile).outcome != "clean"
        unknown += sum(verdict is Verdict.UNKNOWN for verdict in found[0].values())

    assert unknown > 0 or kind == "ops"


@pytest.mark.parametrize("kind", ["records", "syncs", "calls", "ops"])
def test_lost_rows_of_a_kineto_trace_make_nothing_but_unknown(tmp_path: Path, kind: str) -> None:
    for number, seen in enumerate(programs(PROGRAMS, threads=1, kinds=False, start_ns=EPOCH_NS)):
        lost = lossy(seen, random.Random(number), kind)
        profile = read_trace(tmp_path, lost, "2025")

        found, truth = from_profile(profile, seen), judged(seen.timed(profile.facts.error_ns))
        missing = {int(seen.op_of[op.correlation]) for op in seen.ops if op not in lost.ops}
        assert wrong(found, truth, missing) == []


def test_what_threads_tell_each_other_is_unknown(tmp_path: Path) -> None:
    unknown = 0
    for seen in programs(PROGRAMS, threads=2):
        profile = read_export(tmp_path, [seen], "2026.2")

        found, truth = from_profile(profile, seen), judged(seen.timed(profile.facts.error_ns))
        assert wrong(found, truth, set()) == []
        unknown += sum(verdict is Verdict.UNKNOWN for verdict in found[0].values())

    assert unknown > 0


def test_two_processes_with_the_same_correlation_ids_are_kept_apart(tmp_path: Path) -> None:
    pairs = zip(programs(PROGRAMS, threads=1, process=11), programs(2 * PROGRAMS, threads=1, process=12), strict=False)
    for one, other in itertools.islice(pairs, PROGRAMS):
        profile = read_export(tmp_path, [one, other], "2023.3")

        assert processes(profile) == [11, 12]
        for seen in (one, other):
            found, truth = from_profile(profile, seen), judged(seen.timed(profile.facts.error_ns))
            assert found == truth if graphs_on_one_stream(seen) else wrong(found, truth, set()) == []


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_folder_of_tables_is_the_same_export(tmp_path: Path, kind: str) -> None:
    for number, seen in enumerate(programs(10, threads=1)):
        tables = nsys_tables([seen], GENERATIONS["2026.2"])
        profile = read_nsys(write_nsys_folder(tmp_path / str(number), tables, kind=kind))

        path = write_nsys(tmp_path / f"{number}.sqlite", tables)
        assert from_profile(profile, seen) == from_profile(read_nsys(path), seen)


def journal_of(records: Sequence[AnyRecord]) -> Any:
    """The journal of the history: everything but device times."""
    return make_trace("journal", records)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_joined_with_the_journal_a_profile_gives_the_verdicts_of_the_history(tmp_path: Path, generation: str) -> None:
    for seen in programs(PROGRAMS, threads=2):
        profile = read_export(tmp_path, [seen], generation, graph_rows=True)

        trace, coverage = join(journal_of(seen.history), profile)

        assert judged(trace.records) == judged(seen.timed(profile.facts.error_ns))
        assert coverage.timed == coverage.operations == len(seen.times)


@pytest.mark.parametrize("kind", ["records", "syncs", "calls", "ops"])
def test_joined_with_the_journal_lost_rows_only_lose_times(tmp_path: Path, kind: str) -> None:
    """A pair whose times are gone is at most *latent*; what is proven stays so."""
    for number, seen in enumerate(programs(PROGRAMS, threads=2)):
        lost = lossy(seen, random.Random(number), kind)
        if not {op.correlation for op in lost.ops} & {call.correlation for call in lost.calls}:
            continue  # all of two or three operations: refused, see test_join
        trace, coverage = join(journal_of(seen.history), read_export(tmp_path, [lost], "2025.1"))

        (found, weak), (truth, polled) = judged(trace.records), judged(seen.timed(0))
        untimed = coverage.timed < coverage.operations
        allowed = {Verdict.LATENT} if untimed else set()
        assert weak == polled
        assert found.keys() == truth.keys()
        assert all(found[pair] is truth[pair] or found[pair] in allowed for pair in truth)


def as_copies(history: Sequence[AnyRecord]) -> list[AnyRecord]:
    """The history with every copy between host and device writing a page that all other work reads."""
    copies = [r for r in history if isinstance(r, Memcpy) and r.direction.name != "DEVICE_TO_DEVICE"]
    page_of = {record.op: number for number, record in enumerate(copies)}
    found = []
    for record in history:
        if isinstance(record, WORK):
            written = page_of.get(record.op)
            others = [page for page in page_of.values() if page != written]
            accesses = [Access(Space.DEVICE, Mode.READ, page_ids(others))] if others else []
            if written is not None:
                accesses.append(Access(Space.DEVICE, Mode.WRITE, page_ids([written])))
            names = record.__struct_fields__
            fields = {name: getattr(record, name) for name in names}
            record = type(record)(**{**fields, "accesses": tuple(accesses), "layers": ALL_LAYERS})
        found.append(record)
    return found


@pytest.mark.parametrize("generation", GENERATIONS)
def test_copies_are_clean_exactly_when_all_work_is_ordered_with_them(tmp_path: Path, generation: str) -> None:
    outcomes = {"clean": 0, "unknown": 0, "nothing-checked": 0}
    for seen in programs(4 * PROGRAMS, steps=12, threads=1):
        report = check_copies(read_export(tmp_path, [seen], generation))

        unordered = races(as_copies(seen.history), polled=True)
        copies = any(op.direction is not None and op.direction.name != "DEVICE_TO_DEVICE" for op in seen.ops)
        expected = "unknown" if unordered else "clean" if copies and len(seen.times) > 1 else "nothing-checked"
        assert report.outcome == expected, sorted(unordered)
        outcomes[report.outcome] += 1

    assert min(outcomes.values()) > 3, outcomes


@pytest.mark.parametrize("kind", LOSSY_TABLES)
def test_copies_of_a_lossy_export_are_never_clean_by_loss(tmp_path: Path, kind: str) -> None:
    for number, seen in enumerate(programs(4 * PROGRAMS, steps=12, threads=1)):
        report = check_copies(read_export(tmp_path, [lossy(seen, random.Random(number), kind)], "2024.5"))

        if report.outcome == "clean":
            assert not races(as_copies(seen.history), polled=True)


def test_graph_rows_hide_what_is_inside(tmp_path: Path) -> None:
    for seen in programs(PROGRAMS, threads=1):
        profile = read_export(tmp_path, [seen], "2024.5", graph_rows=True)
        if profile.facts.graph_rows:
            assert check_copies(profile).outcome != "clean"
            assert level(profile) is not Level.PROVABLE
            break
    else:
        pytest.fail("no history with a graph")


def test_overlapping_neighbours_of_a_stream_prove_no_order(tmp_path: Path) -> None:
    """As with kernels that start early: the stream's own order is then no proof, neither way."""
    decided = 0
    for seen in programs(4 * PROGRAMS, threads=1, graph_nodes=0):
        by_stream: dict[int, list[int]] = {}
        for place, op in enumerate(seen.ops):
            by_stream.setdefault(op.stream, []).append(place)
        several = [places for places in by_stream.values() if len(places) > 1]
        if not several or any(op.in_graph for op in seen.ops):
            continue
        first, second = several[0][:2]
        early = replace(seen.ops[second], start_ns=seen.ops[first].end_ns - 2_000)
        ops = [*seen.ops[:second], early, *seen.ops[second + 1 :]]
        profile = read_export(tmp_path, [replace(seen, ops=ops)], "2025.1")
        report = check_copies(profile)

        assert profile.facts.same_stream_overlaps == 1
        assert level(profile) is not Level.PROVABLE
        stream = seen.ops[first].stream
        on_it = {row for row, s in enumerate(profile.ops.stream.tolist()) if profile.streams[s].number == stream}
        undecided = {(int(p.earlier), int(p.later)) for p in report.undecided}
        kinds = [None if seen.ops[place].direction is None else seen.ops[place].direction for place in (first, second)]
        if any(kind is not None and kind.name != "DEVICE_TO_DEVICE" for kind in kinds):
            assert any(set(pair) <= on_it for pair in undecided)
            decided += 1

    assert decided > 5


def test_without_the_overlap_the_same_stream_is_in_order(tmp_path: Path) -> None:
    for seen in programs(PROGRAMS, threads=1):
        report = check_copies(read_export(tmp_path, [seen], "2025.1"))

        assert all(
            report.profile.ops.stream[pair.earlier] != report.profile.ops.stream[pair.later]
            for pair in report.undecided
        )


def test_a_re_recorded_event_is_paired_with_its_latest_record(tmp_path: Path) -> None:
    """With one row of records lost, nobody knows which of two records a wait is for."""
    from hicache_obs.testing import History

    history = History("F:w1 e=F G:w2 e=G L<e L:w2,1")
    seen = profiled(history.records, seed=1, threads=1)
    for generation in GENERATIONS:
        whole = read_export(tmp_path, [seen], generation)
        assert from_profile(whole, seen)[0].keys() == {(0, 5)}  # G's record replaced F's
        lost = read_export(tmp_path, [seen.without(records=seen.records[1:])], generation)
        assert set(from_profile(lost, seen)[0].values()) == {Verdict.UNKNOWN}
        assert count_syncs(lost).waits_paired == 0


def test_a_wait_for_a_later_record_is_no_order(tmp_path: Path) -> None:
    from hicache_obs.testing import History

    history = History("F:w1 e=F L<e L:w1 G:w2 e=G G:w1")
    seen = profiled(history.records, seed=1, threads=1, kinds=False, start_ns=EPOCH_NS)
    profile = read_trace(tmp_path, seen, "2023")

    assert count_syncs(profile).future == 1
    assert from_profile(profile, seen)[0][OpId(0), OpId(3)] is Verdict.UNKNOWN
    assert (OpId(0), OpId(3)) not in from_profile(read_trace(tmp_path, seen, "2025"), seen)[0]


def test_a_failed_call_did_nothing(tmp_path: Path) -> None:
    from hicache_obs.testing import History

    seen = profiled(History("F:w1 e=F L<e L:w1").records, seed=3, threads=1)
    calls = [replace(call, result=700) if call.name == "cudaStreamWaitEvent" else call for call in seen.calls]

    assert from_profile(read_export(tmp_path, [seen], "2025.1"), seen)[0] == {}
    failed = read_export(tmp_path, [replace(seen, calls=calls)], "2025.1")
    assert from_profile(failed, seen)[0].keys() == {(OpId(0), OpId(3))}


@pytest.mark.parametrize("text", ["F:w1 e=F L<e L:w1", "F:w1 e=F h<e L:w1", "F:w1 h<F L:w1", "F:w1 h<* L:w1"])
def test_a_row_whose_call_is_lost_leaves_a_doubt(tmp_path: Path, text: str) -> None:
    from hicache_obs.testing import History

    seen = profiled(History(text).records, seed=2, threads=1, kinds=False, start_ns=EPOCH_NS)
    lost = seen.without(calls=[call for call in seen.calls if call.correlation == seen.syncs[0].correlation])
    last = OpId(len(text.split()) - 1)

    for generation in GENERATIONS:
        assert from_profile(read_export(tmp_path, [seen], generation), seen)[0] == {}
        found = from_profile(read_export(tmp_path, [lost], generation), seen)[0]
        assert set(found) == {(OpId(0), last)}
        assert found[OpId(0), last] is Verdict.UNKNOWN
    assert from_profile(read_trace(tmp_path, seen, "2025"), seen)[0] == {}
    assert from_profile(read_trace(tmp_path, lost, "2025"), seen)[0][OpId(0), last] is Verdict.UNKNOWN


def test_a_query_without_an_answer_proves_nothing(tmp_path: Path) -> None:
    """torch.profiler has no answers; Nsight Systems has: a poll if it was yes, nothing if it was no."""
    from hicache_obs.testing import History

    pair, answers = (OpId(0), OpId(3)), set()
    for seed in range(24):
        seen = profiled(History("F:w1 e=F h?e L:w1").records, seed=seed, threads=1, kinds=False, start_ns=EPOCH_NS)
        answer = seen.calls[2].result == 0
        answers.add(answer)

        assert from_profile(read_trace(tmp_path, seen, "2025"), seen)[0][pair] in (Verdict.UNKNOWN, Verdict.VIOLATION)
        verdicts, weak = from_profile(read_export(tmp_path, [seen], "2025.1"), seen)
        assert (pair in weak, pair in verdicts) == (answer, not answer)

    assert answers == {True, False}


def test_replays_of_unnamed_graphs_are_not_taken_for_one_graph(tmp_path: Path) -> None:
    """Two graphs on two streams race; two replays of one graph do not. A file that tells neither leaves a doubt."""
    pages = page_ids([1])

    def replay(op: int, graph: int, stream: int) -> GraphReplay:
        access = Access(Space.DEVICE, Mode.WRITE, pages)
        return GraphReplay(OpId(op), ThreadId(0), 0, graph, StreamId(stream), 0, 0, 0, ALL_LAYERS, (access,))

    for graphs in ((0, 1), (0, 0)):
        seen = profiled([replay(0, graphs[0], 1), replay(1, graphs[1], 2)], seed=4, threads=1)
        assert bool(judged(seen.history)[0]) == (graphs == (0, 1))
        verdicts = from_profile(read_export(tmp_path, [seen], "2025.1"), seen)[0]
        assert verdicts.keys() == {(OpId(0), OpId(1))}
        assert verdicts[OpId(0), OpId(1)] in (Verdict.UNKNOWN, Verdict.VIOLATION)


def test_every_kind_a_profiler_sees_is_in_the_histories() -> None:
    kinds = {type(record) for seen in programs(100) for record in seen.history}

    assert kinds == set(PROFILED)
