"""``open_trace`` tells files apart by their contents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hicache_obs.errors import TraceError
from hicache_obs.readers import open_trace
from hicache_obs.readers.journal import JournalWriter
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.records import EventRecord

CASE = Path(__file__).resolve().parent.parent / "cases" / "01-loadback-over-inflight-forward.json"
RECORD = EventRecord(41, 0, 0, 1, 2)


def test_a_ring_whatever_it_is_called(tmp_path):
    path = tmp_path / "looks-like.json"
    writer = RingWriter(path, slots=8, arena_words=16)
    writer.append(RECORD)
    writer.close()
    assert [record.op for record in open_trace(path)] == [41]


def test_a_journal_directory_and_a_segment(tmp_path):
    writer = JournalWriter(tmp_path / "j")
    writer.write([RECORD])
    writer.close()
    assert [record.op for record in open_trace(tmp_path / "j")] == [41]
    assert [record.op for record in open_trace(str(tmp_path / "j" / "rank0-000001.arrows"))] == [41]
    assert [record.op for record in open_trace(tmp_path / "j", rank=0)] == [41]


def test_a_scenario_with_space_around_it(tmp_path):
    path = tmp_path / "case"
    path.write_bytes(b"\n\t " + CASE.read_bytes())
    assert open_trace(path).labels[8] == "s8"


def test_an_empty_file_is_called_empty(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(TraceError) as raised:
        open_trace(tmp_path / "x")
    assert str(raised.value) == f"{tmp_path / 'x'}: is empty"


@pytest.mark.parametrize("data", [b"\n", b"hello", b"[1]"])
def test_anything_else_is_refused(tmp_path, data):
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(TraceError) as raised:
        open_trace(path)
    assert str(raised.value) == (
        f"{path}: not a ring file, a journal (directory or .arrows segment), Parquet, a scenario (JSON) "
        f"or a profiler's recording; it begins with {data!r}"
    )


@pytest.mark.parametrize("data", [b"SQLite format 3\0", b"\x1f\x8b\x08", b'{"schemaVersion": 1, "traceEvents": []}'])
def test_a_recording_of_a_profiler_is_for_another_command(tmp_path, data):
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(TraceError) as raised:
        open_trace(path)
    assert str(raised.value) == f"{path}: a recording of a profiler, which 'hicache-obs analyze' judges"


def test_a_folder_says_where_its_records_are(tmp_path):
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0-000001.arrows").touch()
    with pytest.raises(TraceError) as raised:
        open_trace(tmp_path)
    assert str(raised.value) == (
        f"{tmp_path}: no journal here, but in its folders a, b, c, ...: name one, or 'hicache-obs analyze {tmp_path}' "
        "judges all"
    )
    (tmp_path / "x.ring").touch()
    with pytest.raises(TraceError) as raised:
        open_trace(tmp_path)
    assert str(raised.value) == f"{tmp_path}: no journal here, but ring files: name them, as in {tmp_path}/*.ring"
    (tmp_path / "rank0.parquet").write_bytes(CASE.read_bytes())
    with pytest.raises(TraceError, match=r"rank0.parquet"):
        open_trace(tmp_path)


def test_a_folder_of_recordings_says_to_name_them(tmp_path):
    for name in ("host.pt.trace.json.gz", "b.sqlite", "notes.txt"):
        (tmp_path / name).write_bytes(b"")

    with pytest.raises(TraceError) as caught:
        open_trace(tmp_path)

    shown = f"{tmp_path}/*.json.gz, {tmp_path}/*.sqlite"
    assert str(caught.value) == f"{tmp_path}: no journal here, but files of a profiler: name them, as in {shown}"


def test_the_folder_of_a_recording_by_torch_says_where_its_traces_are(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "77.json.gz").touch()

    with pytest.raises(TraceError, match=rf"files of a profiler: name them, as in {tmp_path}/torch/\*\.json\.gz$"):
        open_trace(tmp_path)


def test_what_is_not_there(tmp_path):
    with pytest.raises(TraceError, match=r"gone: No such file or directory"):
        open_trace(tmp_path / "gone")
    with pytest.raises(TraceError, match=r"no journal here"):
        open_trace(tmp_path)


def test_a_scenario_is_read_without_torch_or_arrow():
    code = (
        "import sys; from hicache_obs.readers import open_trace; open_trace(sys.argv[1]); "
        "sys.exit(' '.join({'torch', 'pyarrow', 'nvtx'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(CASE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
