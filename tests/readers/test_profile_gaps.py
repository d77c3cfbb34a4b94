"""What a profiler's file does not say is named and never filled in: such a file is not clean, its complete twin is."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from codecs import BOM_UTF8
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main
from hicache_obs.cli.judge import CopyReport, check_copies
from hicache_obs.errors import TraceError
from hicache_obs.readers.kineto import read_kineto
from hicache_obs.readers.nsys import read_nsys
from hicache_obs.readers.open_profile import open_profile
from hicache_obs.readers.preflight import Level, count_syncs, level, preflight
from hicache_obs.readers.profile import CallKind, OpKind, call_kind
from hicache_obs.testing import History
from hicache_obs.testing.kineto_writer import FORMATS, write_kineto
from hicache_obs.testing.nsys_writer import GENERATIONS, Table, nsys_tables, write_nsys, write_nsys_folder
from hicache_obs.testing.profiled import Seen, profiled

EPOCH_NS = 1_700_000_000_000_000_000
FENCED = "F:w1 e=F L<e L:w1 g=L F<g F:r1"
"""A copy on one stream between work on another, with both waits."""
RACY = "F:w1 L:w1 F:r1"
WORK = ("kernel", "gpu_memcpy")
DEVICE_TABLES = ("KERNEL", "MEMCPY")
Event = dict[str, Any]


def seen_of(text: str, **options: Any) -> Seen:
    return profiled(History(text).records, seed=2, threads=1, kinds=False, start_ns=EPOCH_NS, **options)


def events_of(tmp_path: Path, text: str, style: str = "2025", **options: Any) -> list[Event]:
    """The events of a torch.profiler trace of a history."""
    path = write_kineto(tmp_path / "written.json", seen_of(text, **options), FORMATS[style])
    trace = json.loads(path.read_text())
    base = trace.get("baseTimeNanoseconds", 0)
    return [{**event, "ts": event["ts"] + base // 1000} for event in trace["traceEvents"]]


def judged(tmp_path: Path, events: list[Event], **header: Any) -> CopyReport:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**header, "traceEvents": events}))
    return check_copies(read_kineto(path))


def said(report: CopyReport) -> str:
    """The blind spots and causes of a report that is not clean."""
    assert report.outcome in ("unknown", "nothing-checked")
    return "; ".join((*report.blind, *report.causes))


def of(events: list[Event], *categories: str) -> list[Event]:
    return [event for event in events if event["cat"] in categories]


def args(**values: Any) -> Callable[[Event], None]:
    """Sets arguments of an event; ``None`` removes them."""

    def change(event: Event) -> None:
        event["args"] = {k: v for k, v in {**event["args"], **values}.items() if v is not None}

    return change


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaStreamWaitEvent_v3020", CallKind.STREAM_WAIT),
        ("cudaStreamWaitEvent_ptsz_v7000", CallKind.STREAM_WAIT),
        ("cuStreamWaitEvent", CallKind.STREAM_WAIT),
        ("hipStreamWaitEvent", CallKind.STREAM_WAIT),
        ("cudaEventRecordWithFlags_v11010", CallKind.EVENT_RECORD),
        ("cuEventRecord_ptsz", CallKind.EVENT_RECORD),
        ("cudaEventQuery_v3020", CallKind.EVENT_QUERY),
        ("cuCtxSynchronize_v2", CallKind.DEVICE_SYNC),
        ("hipDeviceSynchronize", CallKind.DEVICE_SYNC),
        ("cudaLaunchKernelExC_v11060", CallKind.LAUNCH),
        ("hipExtModuleLaunchKernel", CallKind.LAUNCH),
        ("cudaGraphLaunch_v10000", CallKind.LAUNCH),
        ("cudaMemcpyBatchAsync_v12080", CallKind.LAUNCH),
        ("cuMemsetD8Async", CallKind.LAUNCH),
        ("cuMemcpyHtoD_v2", CallKind.BLOCKING_COPY),
        ("hipMemcpyWithStream", CallKind.BLOCKING_COPY),
        ("cudaGraphAddMemcpyNode_v10000", None),
        ("cudaGraphExecMemcpyNodeSetParams_v11000", None),
        ("cuGraphAddMemsetNode", None),
        ("cudaLaunchHostFunc_v10000", None),
        ("cudaEventElapsedTime_v3020", None),
        ("cudaEventCreateWithFlags_v3020", None),
        ("__cudaPushCallConfiguration", None),
    ],
)
def test_what_a_call_does_is_in_its_name(name: str, kind: CallKind | None) -> None:
    assert call_kind(name) is kind


# -- torch.profiler ------------------------------------------------------------------------------------------


def test_the_complete_twins_are_clean(tmp_path: Path) -> None:
    assert judged(tmp_path, events_of(tmp_path, FENCED)).outcome == "clean"
    assert read_tables(tmp_path, tables_of(FENCED)).outcome == "clean"
    assert "nothing in the file orders them" in said(judged(tmp_path, events_of(tmp_path, RACY)))
    assert "nothing in the file orders them" in said(read_tables(tmp_path, tables_of(RACY)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (args(stream=None), "3 operations whose stream is not stated"),
        (args(stream=-1), "3 operations whose stream is not stated"),
        (args(stream="stream 7"), "3 operations whose stream is not stated"),
        (args(device=None), "3 operations whose stream is not stated"),
        (args(device=(1 << 32) - 1), "3 operations whose stream is not stated"),
        (lambda event: event.pop("args"), "3 operations whose stream is not stated"),
        (args(correlation=None), "3 launches whose device operation is missing"),
        (args(correlation=0), "3 launches whose device operation is missing"),
        (lambda event: event.update(dur=-1), "3 operations without usable times"),
    ],
)
def test_a_row_of_an_operation_that_says_too_little(tmp_path: Path, change: Callable[[Event], None], text: str) -> None:
    """Also of work that races: on one made-up stream it would be in order."""
    for history in (FENCED, RACY):
        events = events_of(tmp_path, history)
        for event in of(events, *WORK):
            change(event)

        assert text in said(judged(tmp_path, events))


def test_what_is_not_stated_is_not_printed_as_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = events_of(tmp_path, RACY)
    for event in of(events, *WORK):
        args(stream=None, device=None)(event)
    judged(tmp_path, events)

    assert main(["analyze", str(tmp_path / "trace.json")]) == 3
    assert "on device unknown stream unknown" in capsys.readouterr().out
    assert main(["analyze", str(tmp_path / "trace.json"), "--json"]) == 3
    pair = json.loads(capsys.readouterr().out)["undecided"]["between"][0]
    assert [(side["device"], side["stream"]) for side in pair["between"]] == [(None, None), (None, None)]


def test_numbers_may_be_written_as_text(tmp_path: Path) -> None:
    events = events_of(tmp_path, FENCED)
    for event in of(events, *WORK):
        args(stream=str(event["args"]["stream"]), device=0.0)(event)

    assert judged(tmp_path, events).outcome == "clean"


@pytest.mark.parametrize("gone", ["args", "correlation", "ts"])
def test_a_call_that_says_too_little(tmp_path: Path, gone: str) -> None:
    """An operation may have been launched by it."""
    events = events_of(tmp_path, FENCED)
    call = next(event for event in of(events, "cuda_runtime") if "Memcpy" in event["name"])
    (call["args"] if gone == "correlation" else call).pop(gone)

    assert "1 host calls without a correlation id or time" in said(judged(tmp_path, events))


def test_without_any_launch_nobody_knows_what_else_ran(tmp_path: Path) -> None:
    one_stream = events_of(tmp_path, "F:w1 F:r1")
    of(one_stream, "kernel")[1].update(cat="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)")

    assert judged(tmp_path, one_stream).outcome == "clean"
    assert "no call that launches anything" in said(judged(tmp_path, of(one_stream, *WORK)))


def test_calls_of_one_microsecond_are_in_the_order_of_their_ids(tmp_path: Path) -> None:
    """A record is not behind a kernel that was launched in the same tick, whatever the order of rows."""
    for text, outcome in (("F:w1 e=F L<e L:w1", "clean"), ("e=F F:w1 L<e L:w1", "unknown")):
        events = events_of(tmp_path, text, "2023")
        for event in of(events, "cuda_runtime"):
            event["ts"] = 1_700_000_000_000_000

        assert judged(tmp_path, events).outcome == outcome
        assert judged(tmp_path, events[::-1]).outcome == outcome


def test_a_clock_against_the_order_of_ids_is_named(tmp_path: Path) -> None:
    events = events_of(tmp_path, FENCED)
    of(events, "cuda_runtime")[0]["ts"] += 10**6

    assert "1 host calls whose times contradict the order of their correlation ids" in said(judged(tmp_path, events))


def test_a_wait_cannot_mean_a_record_that_was_replaced(tmp_path: Path) -> None:
    """The profiler once kept one record of each event: a wait may name one that was no longer the latest."""
    events = events_of(tmp_path, "F:w1 e=F G:w2 e=G L<e L:w1 F<e")
    first, second = (e["args"]["correlation"] for e in of(events, "cuda_runtime") if e["name"] == "cudaEventRecord")
    waits = [event for event in of(events, "cuda_sync") if event["name"] == "Stream Wait Event"]
    assert [wait["args"]["wait_on_cuda_event_record_corr_id"] for wait in waits] == [second, second]
    assert count_syncs(judged(tmp_path, events).profile).waits_paired == 2

    args(wait_on_cuda_event_record_corr_id=first, wait_on_stream=1)(waits[0])
    assert count_syncs(judged(tmp_path, events).profile).waits_paired == 1
    record = {"correlation": second, "stream": 2, "device": 0, "context": 1, "event_id": first_event(waits[0])}
    rows = [event for event in events if event is not waits[1]]
    assert count_syncs(judged(tmp_path, rows).profile).waits_paired == 1  # nothing in the file says so any more
    rows.append({"ph": "X", "cat": "cuda_event", "name": "cudaEvent", "ts": 1, "dur": 1, "args": record})
    assert count_syncs(judged(tmp_path, rows).profile).waits_paired == 0


def first_event(wait: Event) -> int:
    event: int = wait["args"]["wait_on_cuda_event_id"]
    return event


def test_streams_of_two_contexts_may_have_one_number(tmp_path: Path) -> None:
    """As with green contexts: two streams, in no order."""
    for context, outcome in ((1, "clean"), (2, "unknown")):
        events = events_of(tmp_path, "F:w1 F:r1")
        copy = of(events, "kernel")[1]
        copy.update(cat="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)")
        args(context=context)(copy)

        assert judged(tmp_path, events).outcome == outcome


def test_a_wait_of_an_unknown_context_is_on_no_device(tmp_path: Path) -> None:
    """The profiler then writes device 0; the context of the operations tells."""
    for context, outcome in ((1, "clean"), (9, "unknown")):
        events = events_of(tmp_path, FENCED)
        other = next(event for event in of(events, "kernel"))
        elsewhere = {**other, "args": {**other["args"], "device": 0, "context": 2, "correlation": 0}}
        for event in of(events, *WORK):
            args(device=1)(event)
        for event in of(events, "cuda_sync"):
            args(device=0, context=context)(event)

        assert judged(tmp_path, [*events, elsewhere]).outcome == outcome


def test_a_device_synchronisation_of_another_context_waits_for_another_device(tmp_path: Path) -> None:
    text = "F:w1 h<* L:w1"
    for context, outcome in ((1, "clean"), (2, "unknown")):
        events = events_of(tmp_path, text)
        args(context=context)(of(events, "cuda_sync")[0])
        tables = set_column(tables_of(text), "SYNCHRONIZATION", "contextId", lambda _, value=context: value)

        for report in (judged(tmp_path, events), read_tables(tmp_path, tables)):
            assert report.outcome == outcome
            assert any("of another context" in blind for blind in report.blind) == (context == 2)


def test_a_copy_between_devices_says_where_it_ran(tmp_path: Path) -> None:
    for fields, outcome in (({"inDevice": 1, "inContext": 1}, "clean"), ({}, "unknown")):
        events = events_of(tmp_path, "F:w1 F:r1 F:r1")
        for event in of(events, "kernel"):
            args(device=1)(event)
        of(events, "kernel")[1].update(cat="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)")
        of(events, "kernel")[1].update(cat="gpu_memcpy", name="Memcpy PtoP (Device -> Device)")
        args(device=None, context=None, **fields)(events[-1])

        assert judged(tmp_path, events).outcome == outcome


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pageable -> Device)", OpKind.HOST_TO_DEVICE),
        ("Memcpy DtoH (Device -> Host)", OpKind.DEVICE_TO_HOST),
        ("CopyHostToDevice", OpKind.HOST_TO_DEVICE),
        ("CopyDeviceToHost", OpKind.DEVICE_TO_HOST),
        ("Memcpy M2D (Memory -> Device)", OpKind.HOST_TO_DEVICE),
        ("Memcpy D2M (Device -> Memory)", OpKind.DEVICE_TO_HOST),
        ("Memcpy PtoP (Device -> Device)", OpKind.DEVICE_TO_DEVICE),
        ("Memcpy HtoH (Pinned -> Pageable)", OpKind.OTHER_COPY),
        ("Memcpy DtoA (Device -> Array)", OpKind.OTHER_COPY),
        ("Memcpy <unknown> (Unknown -> Unknown)", None),
    ],
)
def test_the_direction_of_a_copy_is_in_its_name(tmp_path: Path, name: str, kind: OpKind | None) -> None:
    events = events_of(tmp_path, FENCED)
    of(events, "gpu_memcpy")[0]["name"] = name
    report = judged(tmp_path, events)

    found = report.profile.ops.kind[-1 if of(events, *WORK)[-1]["cat"] == "gpu_memcpy" else 1]
    assert found == (OpKind.OTHER_COPY if kind is None else kind)
    assert ("copies whose direction is not stated" in "; ".join(report.blind)) == (kind is None)


def test_a_copy_that_a_kernel_did_has_no_direction(tmp_path: Path) -> None:
    events = events_of(tmp_path, FENCED)
    of(events, "gpu_memcpy")[0].update(cat="kernel", name="__amd_rocclr_copyBuffer")

    assert "1 copies that a kernel did" in said(judged(tmp_path, events))


def test_a_hardware_queue_is_no_stream(tmp_path: Path) -> None:
    """AMD traces once named the queue; those that name the stream leave 0 where they do not know it."""
    events = events_of(tmp_path, "F:w1 F:r1", "2026, AMD")
    of(events, "kernel")[1].update(cat="gpu_memcpy", name="Memcpy HtoD (Host -> Device)")

    assert "2 operations placed by hardware queue" in said(judged(tmp_path, events))
    for event in of(events, *WORK):
        args(hsa_queue=3, stream=4)(event)
    assert judged(tmp_path, events).outcome == "clean"
    args(stream=0)(of(events, "kernel")[0])
    assert "1 operations placed by hardware queue" in said(judged(tmp_path, events))


@pytest.mark.parametrize(
    "category", ["xpu_runtime", "mtia_runtime", "mtia_ccp_events", "privateuse1_runtime", "hpu_op"]
)
def test_other_devices_are_named(tmp_path: Path, category: str) -> None:
    events = events_of(tmp_path, FENCED)
    of(events, "kernel")[0]["cat"] = category

    assert f"1 {category} events: the order of such a device is not known here" in said(judged(tmp_path, events))


def test_operations_belong_to_the_process_that_launched_them(tmp_path: Path) -> None:
    """Rows of operations name no process; in a file of two, correlation ids tell, or nobody can."""
    one = events_of(tmp_path, FENCED, process=11)
    other = events_of(tmp_path, RACY, process=12, first_correlation=900)
    report = judged(tmp_path, [*one, *other])

    assert {pair.process for pair in report.undecided} == {12}
    assert sorted({stream.process for stream in report.profile.streams}) == [11, 12]
    assert judged(tmp_path, one).outcome == "clean"
    args(correlation=5)(of(one, "kernel")[0])
    fine = events_of(tmp_path, FENCED, process=12, first_correlation=900)
    assert "1 operations of one of several processes" in said(judged(tmp_path, [*one, *fine]))


def test_arguments_of_other_events_may_be_anything(tmp_path: Path) -> None:
    events = events_of(tmp_path, FENCED)
    odd = {"stream": [1], "device": "cuda:0", "correlation": {}, "bytes": None, "cuda_sync_kind": 4}
    other = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1.5, "tid": "main", "ts": 1, "args": odd}

    header = {"schemaVersion": [1], "cuda_runtime_version": "12.4", "distributedInfo": {"rank": 3}}
    assert judged(tmp_path, [other, *events], **header).outcome == "clean"


def test_a_byte_order_mark_and_a_bare_list(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for text in (json.dumps(events_of(tmp_path, FENCED)), json.dumps({"traceEvents": events_of(tmp_path, FENCED)})):
        path.write_bytes(BOM_UTF8 + text.replace(", ", ",\r\n").encode())
        profile = open_profile(path)
        assert profile is not None
        assert check_copies(profile).outcome == "clean"


def test_sums_of_times_that_leave_64_bits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not fit into 64 bits"):
        judged(tmp_path, events_of(tmp_path, FENCED), baseTimeNanoseconds=9 * 10**18)


def test_how_far_a_trace_goes_without_rows_about_synchronisation(tmp_path: Path) -> None:
    """Work of one stream needs none; a synchronisation of two says nothing without its row."""
    for text, expected in (("F:w1 F:r1 h<F", Level.PROVABLE), ("F:w1 G:r2 h<F", Level.OBSERVABLE)):
        events = events_of(tmp_path, text)
        of(events, "kernel")[0].update(cat="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)")

        assert level(judged(tmp_path, events).profile) is Level.PROVABLE
        assert level(judged(tmp_path, of(events, "cuda_runtime", *WORK)).profile) is expected


# -- Nsight Systems ------------------------------------------------------------------------------------------


def tables_of(text: str, generation: str = "2025.1", **options: Any) -> dict[str, Table]:
    return nsys_tables([seen_of(text, **options)], GENERATIONS[generation])


def read_tables(tmp_path: Path, tables: dict[str, Table]) -> CopyReport:
    path = tmp_path / "export.sqlite"
    path.unlink(missing_ok=True)
    return check_copies(read_nsys(write_nsys(path, tables)))


def set_column(tables: dict[str, Table], table: str, column: str, value: Callable[[Any], Any]) -> dict[str, Table]:
    """The same tables with other values in one column of ``CUPTI_ACTIVITY_KIND_`` and ``table``."""
    name = f"CUPTI_ACTIVITY_KIND_{table}"
    columns, rows = tables[name]
    place = columns.index(column)
    changed = [(*row[:place], value(row[place]), *row[place + 1 :]) for row in rows]
    return {**tables, name: (columns, changed)}


def without_column(tables: dict[str, Table], table: str, column: str) -> dict[str, Table]:
    columns, rows = tables[table]
    place = columns.index(column)
    return {**tables, table: ([*columns[:place], *columns[place + 1 :]], [r[:place] + r[place + 1 :] for r in rows])}


NEEDED = {
    "KERNEL": ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid"),
    "MEMCPY": ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "copyKind"),
    "RUNTIME": ("start", "globalTid", "correlationId", "nameId"),
    "SYNCHRONIZATION": ("contextId", "streamId", "correlationId", "globalPid", "eventId"),
    "CUDA_EVENT": ("contextId", "streamId", "correlationId", "globalPid", "eventId"),
}


@pytest.mark.parametrize("table", NEEDED)
def test_a_column_that_is_missing_is_named(tmp_path: Path, table: str) -> None:
    name = f"CUPTI_ACTIVITY_KIND_{table}"
    for column in NEEDED[table]:
        for history in (FENCED, RACY) if table in DEVICE_TABLES else (FENCED,):
            report = read_tables(tmp_path, without_column(tables_of(history), name, column))

            assert f"table {name} has no column {column}" in said(report)
            assert level(report.profile) is not Level.PROVABLE


@pytest.mark.parametrize("column", ["deviceId", "returnValue", "end", "shortName", "bytes"])
def test_a_column_that_is_not_needed_may_be_missing(tmp_path: Path, column: str) -> None:
    tables = tables_of(FENCED)
    places = {
        "deviceId": "SYNCHRONIZATION", "returnValue": "RUNTIME", "end": "RUNTIME", "shortName": "KERNEL",
        "bytes": "MEMCPY",
    }  # fmt: skip

    changed = without_column(tables, f"CUPTI_ACTIVITY_KIND_{places[column]}", column)
    assert read_tables(tmp_path, changed).outcome == "clean"


def test_an_event_without_its_id_is_known_by_the_other_one(tmp_path: Path) -> None:
    tables = tables_of(FENCED, "2026.2")
    for table in ("SYNCHRONIZATION", "CUDA_EVENT"):
        tables = without_column(tables, f"CUPTI_ACTIVITY_KIND_{table}", "eventId")

    assert read_tables(tmp_path, tables).outcome == "clean"


@pytest.mark.parametrize(
    ("table", "column", "value", "text"),
    [
        ("KERNEL", "streamId", None, "2 operations whose stream is not stated"),
        ("KERNEL", "streamId", (1 << 32) - 1, "2 operations whose stream is not stated"),
        ("KERNEL", "correlationId", 0, "2 launches whose device operation is missing"),
        ("KERNEL", "end", 1, "2 operations without usable times"),
        ("MEMCPY", "copyKind", 0, "1 copies whose direction is not stated"),
        ("RUNTIME", "nameId", 10**6, "host calls without a name"),
        ("RUNTIME", "start", None, "host calls without a correlation id or time"),
        ("CUDA_EVENT", "eventId", None, "a wait or synchronisation whose other side the file does not name"),
        ("CUDA_EVENT", "streamId", None, "a wait or synchronisation whose other side the file does not name"),
    ],
)
def test_a_cell_that_says_nothing(tmp_path: Path, table: str, column: str, value: Any, text: str) -> None:
    assert text in said(read_tables(tmp_path, set_column(tables_of(FENCED), table, column, lambda _: value)))


def test_the_device_of_a_wait_is_that_of_its_context(tmp_path: Path) -> None:
    """Rows about synchronisation say device 0 whatever the device is."""
    for history, outcome in ((FENCED, "clean"), (RACY, "unknown")):
        tables = tables_of(history)
        for table in DEVICE_TABLES:
            tables = set_column(tables, table, "deviceId", lambda _: 1)
        report = read_tables(tmp_path, tables)

        assert report.outcome == outcome
        assert {stream.device for stream in report.profile.streams} == {1}
    events = events_of(tmp_path, FENCED)
    args(device=1)(of(events, "gpu_memcpy")[0])
    assert "1 contexts whose operations name several devices" in said(judged(tmp_path, events))
    contradicting = set_column(tables_of(FENCED), "MEMCPY", "deviceId", lambda _: 1)
    assert "1 contexts whose operations name several devices" in said(read_tables(tmp_path, contradicting))


def test_processes_of_two_machines_may_have_one_number(tmp_path: Path) -> None:
    """Then the upper bits tell them apart; else a difference there alone means nothing."""
    one, other = seen_of(FENCED), replace(seen_of("F:w1 F:r1"), process=7)

    def moved(value: int) -> int:
        """Process 7 becomes 4242 of another machine."""
        return value if value >> 24 & 0xFFFFFF == 4242 else 1 << 56 | 4242 << 24 | value & 0xFFFFFF

    both = nsys_tables([one, other], GENERATIONS["2025.1"])
    for table in ("KERNEL", "RUNTIME"):
        both = set_column(both, table, "globalTid" if table == "RUNTIME" else "globalPid", moved)

    report = read_tables(tmp_path, both)
    assert report.outcome == "clean"
    assert len({stream.process for stream in report.profile.streams}) == 2
    assert 4242 not in {stream.process for stream in report.profile.streams}

    alone = nsys_tables([one], GENERATIONS["2025.1"])
    shorter = set_column(alone, "RUNTIME", "globalTid", lambda value: value & (1 << 48) - 1)
    assert read_tables(tmp_path, shorter).outcome == "clean"


def test_an_id_of_two_records_or_of_a_later_one_names_none(tmp_path: Path) -> None:
    tables = tables_of(FENCED, "2026.2")
    assert count_syncs(read_tables(tmp_path, tables).profile).waits_paired == 2
    twice = set_column(tables, "CUDA_EVENT", "eventSyncId", lambda _: 1)
    assert count_syncs(read_tables(tmp_path, twice).profile).waits_paired == 0

    names = iter((2, 2))
    later = set_column(tables, "SYNCHRONIZATION", "eventSyncId", lambda _: next(names))
    records = {row[-1] for row in later["CUPTI_ACTIVITY_KIND_CUDA_EVENT"][1]}
    assert records == {1, 2}
    counts = count_syncs(read_tables(tmp_path, later).profile)
    assert (counts.waits_paired, counts.future) == (1, 1)


def test_the_tool_says_itself_that_it_lost_something(tmp_path: Path) -> None:
    for text, outcome in (
        ("Number of CUPTI events produced: 12, CUPTI buffers: 1.", "clean"),
        ("Not all CUDA events might have been collected. HOME=/root", "unknown"),
    ):
        report = read_tables(tmp_path, {**tables_of(FENCED), "DIAGNOSTIC_EVENT": (["text"], [(text,)])})

        assert report.outcome == outcome
        assert "HOME" not in "".join(check.text for check in preflight(report.profile))


def test_event_tracing_and_batches_of_copies_are_named(tmp_path: Path) -> None:
    seen = seen_of(FENCED)
    for times in (False, True):
        tables = nsys_tables([seen], GENERATIONS["2026.2"], event_times=times)
        checks = preflight(read_tables(tmp_path, tables).profile)

        assert [check.name for check in checks if not check.good] == ["event trace"] * times
    batch = set_column(tables_of(FENCED, "2026.2"), "MEMCPY", "copyCount", lambda _: 9)
    report = read_tables(tmp_path, batch)
    assert report.outcome == "clean"
    assert "1 rows stand for several copies" in preflight(report.profile)[0].text


def test_ranges_of_others_do_not_hide_that_ours_are_lost(tmp_path: Path) -> None:
    for domain, lost in ((7, False), (8, True)):
        tables = tables_of(FENCED)
        columns, rows = tables["NVTX_EVENTS"]
        kind, place = columns.index("eventType"), columns.index("domainId")
        moved = [row if row[kind] == 75 else (*row[:place], domain, *row[place + 1 :]) for row in rows]

        assert read_tables(tmp_path, {**tables, "NVTX_EVENTS": (columns, moved)}).profile.facts.lost_ranges == lost


def test_a_database_that_is_not_written_to_its_end(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "export.sqlite", tables_of(FENCED))
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME")
        database.commit()
        with pytest.raises(TraceError, match=r"not written to its end: export\.sqlite-wal"):
            read_nsys(path)
        link = tmp_path / "link.sqlite"
        link.symlink_to(path)
        with pytest.raises(TraceError, match=r"link\.sqlite: not written to its end: export\.sqlite-wal"):
            read_nsys(link)
    assert len(read_nsys(path).calls) == 0
    path.with_name("export.sqlite-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7")
    with pytest.raises(TraceError, match=r"not written to its end: export\.sqlite-journal"):
        read_nsys(path)


def test_a_folder_of_arrow_streams(tmp_path: Path) -> None:
    from pyarrow import ipc

    folder = write_nsys_folder(tmp_path / "folder", tables_of(FENCED), kind="arrow")
    for file in folder.iterdir():
        table = ipc.open_file(file).read_all()
        with ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)

    assert check_copies(read_nsys(folder)).outcome == "clean"
    (folder / "StringIds.arrow").write_bytes((folder / "StringIds.arrow").read_bytes()[:100])
    with pytest.raises(TraceError, match=r"StringIds\.arrow"):
        read_nsys(folder)


def test_payloads_of_others_may_use_all_64_bits(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    folder = write_nsys_folder(tmp_path / "folder", tables_of(FENCED), kind="parquet")
    path = folder / "NVTX_EVENTS.parquet"
    table = parquet.read_table(path)
    values = pa.array([2**64 - 1, *[None] * (table.num_rows - 1)], pa.uint64())
    place = table.schema.get_field_index("uint64Value")
    parquet.write_table(table.set_column(place, "uint64Value", values), path)

    assert check_copies(read_nsys(folder)).outcome == "clean"
