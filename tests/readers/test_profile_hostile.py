"""Profiler files nobody should trust: one clear error and exit code 2, or a safe answer; memory stays bounded."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import sqlite3
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main
from hicache_obs.errors import TraceError
from hicache_obs.readers import tables
from hicache_obs.readers.kineto import read_kineto
from hicache_obs.readers.nsys import read_nsys
from hicache_obs.testing import History
from hicache_obs.testing.kineto_writer import FORMATS, write_kineto
from hicache_obs.testing.nsys_writer import GENERATIONS, Table, nsys_tables, write_nsys, write_nsys_folder
from hicache_obs.testing.profiled import profiled

SCRIPT = "<script>alert(1)</script>\x1b[31m\ud800"
TEXT = "F:w1 e=F L<e L:w1 F:r1 h<e B:r2 h<* F:w2 L:w2"
SEEN = profiled(History(TEXT).records, seed=2, threads=1, kinds=False, start_ns=1_700_000_000_000_000_000)


def export() -> dict[str, Table]:
    """Tables of a good export."""
    return nsys_tables([SEEN], GENERATIONS["2026.2"])


def changed(table: str, column: str, value: Any, row: int = 0) -> dict[str, Table]:
    """The good export with one value replaced."""
    found = export()
    columns, rows = found[table]
    cells = list(rows[row])
    cells[columns.index(column)] = value
    found[table] = columns, [*rows[:row], tuple(cells), *rows[row + 1 :]]
    return found


def refused(capsys: pytest.CaptureFixture[str], path: str | Path) -> str:
    """The one line of a file that ``analyze`` refuses."""
    assert main(["analyze", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert str(path) in line or Path(path).name in line
    return line


def answered(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    """What ``analyze`` prints of a file that it takes, as text."""
    assert main(["analyze", str(path)]) in (0, 3)
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def damage(path: Path, cut: Callable[[bytes], bytes]) -> Path:
    """The file with other contents."""
    path.write_bytes(cut(path.read_bytes()))
    return path


KINETO: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (lambda p: damage(p, lambda data: data[:-40]), "not valid JSON"),
    "no JSON": (lambda p: p.write_text('{"traceEvents": [oops'), "not valid JSON"),
    "deep": (lambda p: p.write_text('{"traceEvents": ' + "[" * 100_000), "not"),
    "events are no list": (lambda p: p.write_text('{"traceEvents": 7}'), "not a torch.profiler trace"),
    "not UTF-8": (lambda p: p.write_bytes(b'{"traceEvents": [{"name": "\xff\xfe"}]}'), ""),
    "id beyond 64 bits": (lambda p: put(p, correlation=10**30), "64 bits"),
    "time beyond 64 bits": (lambda p: put(p, ts=10**18), "64 bits"),
    "time without end": (lambda p: put(p, ts="@1e400@"), "Number out of range"),
    "time is text": (lambda p: put(p, ts="soon"), "not a torch.profiler trace"),
    "size is no number": (lambda p: put(p, bytes="many"), "no number"),
    "size without end": (lambda p: put(p, bytes="inf"), "64 bits"),
}


def put(path: Path, *, correlation: int = 5, ts: Any = 7, bytes: Any = 4) -> None:
    """A trace with one copy."""
    args = {"stream": 7, "device": 0, "correlation": correlation, "bytes": bytes}
    event = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": ts, "dur": 1, "args": args}
    path.write_text(json.dumps({"traceEvents": [event]}).replace('"@', "").replace('@"', ""))


@pytest.mark.parametrize("name", KINETO)
def test_bad_kineto(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = write_kineto(tmp_path / "trace.json", SEEN, FORMATS["2025"])
    make, text = KINETO[name]
    make(path)

    assert text in refused(capsys, path)


def test_ids_of_10_to_the_18_are_only_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    put(path, correlation=10**18)

    assert "NOTHING CHECKED" in answered(capsys, path)


def test_a_gzip_file_that_ends_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_kineto(tmp_path / "trace.json.gz", SEEN, FORMATS["2025"])

    assert "damaged gzip file" in refused(capsys, damage(path, lambda data: data[:-20]))
    assert "damaged gzip file" in refused(capsys, damage(path, lambda data: data[:40] + b"\xff" * 40))


def test_a_gzip_file_of_several_members_is_read_whole(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "trace.json", SEEN, FORMATS["2025"])
    data = path.read_bytes()
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(data[:100]) + gzip.compress(data[100:]) + b"\0\0")

    assert len(read_kineto(packed).ops) == len(SEEN.ops)


def test_a_gzip_bomb_is_stopped_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(b" " * (1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="unpacks to more than 1048576 bytes"):
            read_kineto(path, limit=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


EXPORTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (lambda p: damage(p, lambda data: data[: len(data) // 2]), "malformed"),
    "only a header": (lambda p: damage(p, lambda data: data[:16]), "SQLite"),
    "no export": (lambda p: (p.unlink(), write_nsys(p, {"names": (["id"], [(1,)])})), "not an Nsight Systems export"),
    "correlation 10^18": (
        lambda p: (p.unlink(), write_nsys(p, changed("CUPTI_ACTIVITY_KIND_RUNTIME", "correlationId", 10**18))),
        "correlation id 1000000000000000000",
    ),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_bad_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = write_nsys(tmp_path / "export.sqlite", export())
    make, text = EXPORTS[name]
    make(path)

    assert text in refused(capsys, path)


ODD_VALUES = ["text", "1; DROP TABLE StringIds", b"\x00\xff", 1e300, -(2**63), 2**63 - 1, None, ""]


@pytest.mark.parametrize("value", ODD_VALUES, ids=repr)
@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("CUPTI_ACTIVITY_KIND_KERNEL", "start"),
        ("CUPTI_ACTIVITY_KIND_KERNEL", "streamId"),
        ("CUPTI_ACTIVITY_KIND_KERNEL", "shortName"),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", "copyKind"),
        ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "eventSyncId"),
        ("CUPTI_ACTIVITY_KIND_CUDA_EVENT", "globalPid"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "globalTid"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "returnValue"),
        ("NVTX_EVENTS", "end"),
        ("NVTX_EVENTS", "int64Value"),
        ("StringIds", "value"),
        ("StringIds", "id"),
        ("TARGET_INFO_CUDA_STREAM", "flag"),
    ],
)
def test_a_column_of_sqlite_may_hold_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str, column: str, value: Any
) -> None:
    path = write_nsys(tmp_path / "export.sqlite", changed(table, column, value, row=-1 if table == "StringIds" else 0))

    assert "DECIDABLE" in answered(capsys, path)


def test_names_are_printed_without_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = export()
    columns, rows = found["StringIds"]
    found["StringIds"] = columns, [(number, SCRIPT[:-1] if text == "forward" else text) for number, text in rows]
    export_path = write_nsys(tmp_path / "export.sqlite", found)
    trace_path = write_kineto(tmp_path / "trace.json", SEEN, FORMATS["2025"])
    name = json.dumps(SCRIPT[:-1])
    trace_path.write_text(trace_path.read_text().replace('"forward"', name))

    for path in (export_path, trace_path):
        text = answered(capsys, path)
        assert "<script>alert(1)</script>?[31m" in text
        assert "\x1b" not in text
        assert main(["analyze", str(path), "--json"]) == 3
        captured = capsys.readouterr().out
        assert "\x1b" not in captured
        assert SCRIPT[:-1] in {pair["between"][0]["name"] for pair in json.loads(captured)["undecided"]["between"]}


def test_sql_in_names_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_nsys(tmp_path / 'a"; DROP TABLE StringIds; --.sqlite', export())

    assert "NOT DECIDABLE" in answered(capsys, path)
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM StringIds").fetchone()[0] > 0


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
        "SELECT x AS start, x AS end FROM n",
        "CREATE VIRTUAL TABLE CUPTI_ACTIVITY_KIND_KERNEL USING fts5(start, end)",
    ],
    ids=["view", "virtual table"],
)
def test_views_and_virtual_tables_are_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], statement: str
) -> None:
    found = export()
    del found["CUPTI_ACTIVITY_KIND_KERNEL"]
    path = write_nsys(tmp_path / "export.sqlite", found)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(statement)
        database.commit()

    copies = sum(op.direction is not None for op in SEEN.ops)
    assert len(read_nsys(path).ops) == copies
    answered(capsys, path)


def test_reading_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_nsys(tmp_path / "export.sqlite", export())
    before = path.read_bytes()
    path.chmod(0o444)

    answered(capsys, path)

    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["export.sqlite"]


def test_more_rows_than_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compressed table may claim any number."""
    folder = write_nsys_folder(tmp_path / "folder", export(), kind="parquet")
    monkeypatch.setattr(tables, "MAX_VALUES", 40)

    with pytest.raises(TraceError, match=r"table CUPTI_ACTIVITY_KIND_RUNTIME has \d+ rows; at most 6 are read"):
        read_nsys(folder)
    with pytest.raises(TraceError, match="at most 6 are read"):
        read_nsys(write_nsys(tmp_path / "export.sqlite", export()))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_damaged_table_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    folder = write_nsys_folder(tmp_path / "folder", export(), kind=kind)
    damage(folder / f"CUPTI_ACTIVITY_KIND_RUNTIME.{kind}", lambda data: data[: len(data) // 2])

    assert "CUPTI_ACTIVITY_KIND_RUNTIME" in refused(capsys, folder)


def test_a_text_of_negative_length_in_an_arrow_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Arrow itself believes the offsets of a file."""
    import pyarrow as pa
    from pyarrow import ipc

    folder = write_nsys_folder(tmp_path / "folder", export(), kind="arrow")
    offsets = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 3, 1)))
    texts = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"abc"))
    table = pa.table({"id": pa.array([1, 2]), "value": texts})
    with ipc.new_file(folder / "StringIds.arrow", table.schema) as file:
        file.write_table(table)

    assert "table StringIds" in refused(capsys, folder)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/no/such/file"])
def test_paths_that_are_no_files(capsys: pytest.CaptureFixture[str], path: str) -> None:
    assert "No such file" in (line := refused(capsys, path)) or "must be a regular file" in line


@pytest.mark.parametrize("command", ["analyze", "check", "report", "convert"])
def test_a_name_that_no_file_can_have(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    path, out = tmp_path / ("x" * 300), tmp_path / ("y" * 300 + ".json")
    more = {"report": ["-o", str(tmp_path / "r.html")], "convert": ["-o", str(tmp_path / "c.json")]}

    assert main([command, str(path), *more.get(command, [])]) == 2
    assert capsys.readouterr().err == f"hicache-obs: {path}: File name too long\n"
    if command in more:
        good = write_kineto(tmp_path / "trace.json", SEEN, FORMATS["2025"])
        assert main([command, str(good), "-o", str(out)]) == 2
        assert capsys.readouterr().err.endswith(f"{out}: File name too long\n")


@pytest.mark.parametrize("suffix", [".sqlite", ".nsys-rep", ".json.gz"])
def test_a_pipe_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    path = tmp_path / f"pipe{suffix}"
    os.mkfifo(path)

    assert "must be a regular file" in refused(capsys, path)


def test_links_are_followed_to_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, loop, device = tmp_path / "good", tmp_path / "loop", tmp_path / "device"
    good.symlink_to(write_nsys(tmp_path / "export.sqlite", export()))
    loop.symlink_to(loop)
    device.symlink_to("/dev/zero")

    assert "NOT DECIDABLE" in answered(capsys, good)
    assert "symbolic links" in refused(capsys, loop)
    assert "must be a regular file" in refused(capsys, device)
    folder = write_nsys_folder(tmp_path / "folder", export(), kind="parquet")
    (folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet").unlink()
    (folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet").symlink_to("/dev/zero")
    answered(capsys, folder)


def test_a_report_without_nsys(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    path = tmp_path / "demo.nsys-rep"
    path.write_bytes(b"junk")
    monkeypatch.setenv("PATH", str(tmp_path))

    assert "needs the nsys of Nsight Systems on PATH" in refused(capsys, path)


def test_a_report_that_nsys_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    path, nsys = tmp_path / "demo.nsys-rep", tmp_path / "nsys"
    path.write_bytes(b"junk")
    said = "Version number is invalid\n[tag_report_file_name*] = demo.nsys-rep"
    nsys.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    nsys.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    assert "nsys cannot read it: Version number is invalid" in refused(capsys, path)
    assert shutil.which("nsys") == str(nsys)


def test_the_fast_path_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every odd value as well: both let SQLite make integers of them."""
    pytest.importorskip("adbc_driver_sqlite", reason="tool: adbc-driver-sqlite is not installed; the extra profilers")
    for number, value in enumerate(ODD_VALUES):
        odd = changed("CUPTI_ACTIVITY_KIND_RUNTIME", "returnValue", value)
        path = write_nsys(tmp_path / f"{number}?#%20.sqlite", odd)
        slow = read_nsys(path)
        monkeypatch.setattr(tables, "_LARGE", 0)
        quick = read_nsys(path)
        monkeypatch.undo()
        for column in ("start_ns", "stream", "call", "size_bytes"):
            assert getattr(quick.ops, column).tolist() == getattr(slow.ops, column).tolist()
        for column in ("start_ns", "result", "record", "stream"):
            assert getattr(quick.calls, column).tolist() == getattr(slow.calls, column).tolist()


def test_the_fast_path_names_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adbc_driver_sqlite", reason="tool: adbc-driver-sqlite is not installed; the extra profilers")
    path = write_nsys(tmp_path / "export.sqlite", export())
    monkeypatch.setattr(tables, "_LARGE", 0)

    with contextlib.closing(sqlite3.connect(path)) as database:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'CUPTI_ACTIVITY_KIND_MEMCPY'"
        page = database.execute(query).fetchone()[0]
    damage(path, lambda data: data[: (page - 1) * 4096] + b"\x0d\xff" * 2048 + data[page * 4096 :])

    with pytest.raises(TraceError, match=r"export\.sqlite: "):
        read_nsys(path)
