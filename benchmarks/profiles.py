"""Profiler files of any size for the benchmarks: made up, with the columns and the mix of a real recording."""

from __future__ import annotations

import contextlib
import gzip
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PID = 4242 << 24
START_NS = 1_000_000_000
NAMES = ("cudaLaunchKernel_v7000", "cudaMemcpyAsync_v3020", "cudaEventRecord_v3020", "cudaStreamWaitEvent_v3020")
TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "start,end,deviceId,contextId,greenContextId,streamId,correlationId,globalPid,"
    "demangledName,shortName,gridX,blockX,graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start,end,deviceId,contextId,greenContextId,streamId,correlationId,globalPid,bytes,"
    "copyKind,srcKind,dstKind,graphNodeId,copyCount",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start,end,eventClass,globalTid,correlationId,nameId,returnValue,callchainId",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "start,end,deviceId,contextId,greenContextId,streamId,correlationId,"
    "globalPid,syncType,eventId,eventSyncId",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "deviceId,contextId,greenContextId,streamId,correlationId,globalPid,eventId,"
    "timestamp,eventSyncId",
    "NVTX_EVENTS": "start,end,eventType,rangeId,text,textId,globalTid,domainId,uint64Value,int64Value",
}
"""Columns of each table."""


def write_export(path: Path, rows: int) -> Path:
    """A SQLite export of ``rows`` rows: kernels and copies, their calls, event records, waits and ranges."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA synchronous = OFF")
        for table, columns in TABLES.items():
            database.execute(f"CREATE TABLE {table} ({columns})")
            places = ",".join("?" * (columns.count(",") + 1))
            database.executemany(f"INSERT INTO {table} VALUES ({places})", _rows(table, rows // 10))
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        strings = (*NAMES, *(f"kernel_{number}" for number in range(200)))
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(strings, 1))
        database.commit()
    return path


def _rows(table: str, count: int) -> Iterator[tuple[Any, ...]]:
    """``count`` times: a kernel on stream 7, its event, a wait for it on 13, a kernel and now and then a copy there."""
    for i in range(count):
        at, first = START_NS + 40_000 * i, 10 * i + 1
        if table.endswith("KERNEL"):
            for n, stream in ((0, 7), (3, 13)):
                start = at + 1000 * (n + 4)
                yield start, start + 900, 0, 1, None, stream, first + n, PID, 5, 5 + i % 200, 1, 128, None
        elif table.endswith("MEMCPY"):
            start = at + 12_000
            yield start, start + 900, 0, 1, None, 13, first + 4, PID, 65536, 1, 1, 2, None, 1
        elif table.endswith("RUNTIME"):
            for n, name in enumerate((1, 3, 4, 1, 2)):
                yield at + 1000 * n, at + 1000 * n + 700, 0, PID | 4242, first + n, name, 0, None
        elif table.endswith("SYNCHRONIZATION") and i % 2 == 0:
            yield at + 2000, at + 2700, 0, 1, None, 13, first + 2, PID, 2, i % 64, i + 1
        elif table.endswith("CUDA_EVENT"):
            yield 0, 1, None, 7, first + 1, PID, i % 64, 0, i + 1
        elif table == "NVTX_EVENTS" and i % 2 == 0:
            yield at - 500, at + 9_000, 59, None, None, 5, PID | 4242, 0, None, None


def write_trace(path: Path, size: int) -> Path:
    """A torch.profiler trace of about ``size`` bytes, unpacked: five in seven events are host operators."""
    events, number, total = [], 0, 0
    while total < size:
        number += 1
        ts = 1_700_000_000_000.5 + 40 * number
        kernel = {"device": 0, "context": 1, "stream": 7 + number % 2 * 6, "correlation": number, "grid": [1, 1, 1]}
        new = [
            _event("kernel", f"kernel_{number % 200}", 0, 7, ts + 9, 8.25, kernel),
            _event("cuda_runtime", "cudaLaunchKernel", 4242, 1, ts, 4.5, {"cbid": 211, "correlation": number}),
            *(_event("cpu_op", f"aten::op_{n}", 4242, 1, ts + n, 0.75, {"External id": number}) for n in range(5)),
        ]
        total += 7 * 165 if number > 1 else len(json.dumps(new))
        events += new
    text = json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": 0, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
    return path


def _event(cat: str, name: str, pid: int, tid: int, ts: float, dur: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def read_with_pandas(path: str | Path) -> int:
    """The numeric columns of all tables as data frames; returns the number of rows."""
    import pandas as pd

    with contextlib.closing(sqlite3.connect(path)) as database:
        return sum(
            len(pd.read_sql_query(f"SELECT {columns} FROM {table}", database)) for table, columns in TABLES.items()
        )
