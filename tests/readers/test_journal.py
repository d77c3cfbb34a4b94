"""Journal files: naming, rotation, runs, ranks, and everything that can be cut off or missing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

from hicache_obs.errors import ConfigError, TraceError
from hicache_obs.readers import journal_writer
from hicache_obs.readers.journal import JournalWriter, read_journal
from hicache_obs.records import (
    ALL_LAYERS,
    NO_OP,
    Define,
    DefineSpace,
    Direction,
    DropReason,
    EventRecord,
    Kernel,
    Lost,
    Memcpy,
    Mode,
    OpId,
    StreamId,
    ThreadId,
    device,
    host,
)


def marks(*ops):
    return [EventRecord(op, 0, 10 * op, 1, 2) for op in ops]


def ops(trace):
    return [f"lost {r.count} {r.reason.name}" if isinstance(r, Lost) else int(r.op) for r in trace]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(folder, *batches, **options):
    writer = JournalWriter(folder, **options)
    for batch in batches:
        writer.write(batch)
    writer.close()


def test_a_run_makes_numbered_segments_of_bounded_size(tmp_path):
    write(tmp_path / "j", marks(1, 2), marks(3), marks(4), segment_bytes=1)
    assert names(tmp_path / "j") == ["rank0-000001.arrows", "rank0-000002.arrows", "rank0-000003.arrows"]
    assert ops(read_journal(tmp_path / "j")) == [1, 2, 3, 4]


def test_an_empty_run_is_an_empty_journal(tmp_path):
    write(tmp_path, [])
    assert names(tmp_path) == ["rank0-000001.arrows"]
    assert ops(read_journal(tmp_path)) == []


def test_a_new_run_takes_the_next_number_and_is_the_one_that_is_read(tmp_path):
    write(tmp_path, marks(1), marks(2), segment_bytes=1)
    first = (tmp_path / "rank0-000001.arrows").read_bytes()
    write(tmp_path, marks(7))
    assert names(tmp_path) == [f"rank0-00000{n}.arrows" for n in (1, 2, 3)]
    assert (tmp_path / "rank0-000001.arrows").read_bytes() == first
    trace = read_journal(tmp_path)
    assert ops(trace) == [7]
    assert trace.notes == (
        f"{tmp_path}: older runs are left out (rank0-000001.arrows to rank0-000002.arrows); open a file to read it",
    )
    assert ops(read_journal(tmp_path / "rank0-000001.arrows")) == [1]


def test_two_writers_at_once_do_not_share_a_file(tmp_path):
    one, two = JournalWriter(tmp_path), JournalWriter(tmp_path)
    one.write(marks(1))
    two.write(marks(2))
    one.close()
    two.close()
    assert names(tmp_path) == ["rank0-000001.arrows", "rank0-000002.arrows"]


def test_ranks_have_files_of_their_own_and_one_must_be_chosen(tmp_path):
    write(tmp_path, marks(1), rank=0)
    write(tmp_path, marks(2), rank=3)
    assert names(tmp_path) == ["rank0-000001.arrows", "rank3-000001.arrows"]
    with pytest.raises(
        TraceError,
        match=r"holds the journals of ranks 0, 3: say which one \(--rank N\); 'hicache-obs analyze' takes all",
    ):
        read_journal(tmp_path)
    assert ops(read_journal(tmp_path, rank=3)) == [2]
    with pytest.raises(TraceError, match=r"holds no journal of rank 1, only of 0, 3"):
        read_journal(tmp_path, rank=1)


def test_any_arrow_library_can_read_it(tmp_path):
    """What the columns look like to somebody who has only the file."""
    pages = np.array([7, 8, 9, 3], dtype=np.int64)
    accesses = (host(Mode.READ, np.arange(4)), device(Mode.WRITE, pages))
    copies = [Memcpy(n, 0, 0, 5, 0, 1, 64, (n, n + 1), accesses, Direction.HOST_TO_DEVICE) for n in range(2)]
    write(tmp_path, [Define(NO_OP, 0, 0, DefineSpace.STREAM, 5, "load", 0), *copies], engine="demo 1", clock="host")
    with pa.OSFile(str(tmp_path / "rank0-000001.arrows")) as file:
        stream = ipc.open_stream(file)
        table = stream.read_all()
    assert table.column("kind").to_pylist() == ["define", "memcpy", "memcpy"]
    assert table.column("text").to_pylist() == ["load", None, None]
    assert table.column("layer_begin").to_pylist() == [None, 0, 1]
    assert table.column("accesses").to_pylist()[1:] == [
        [
            {"space": 1, "mode": 0, "pool": 0, "pages": [{"start": 0, "count": 4}], "same_as": None},
            {
                "space": 0,
                "mode": 1,
                "pool": 0,
                "pages": [{"start": 7, "count": 3}, {"start": 3, "count": 1}],
                "same_as": None,
            },
        ],
        [
            {"space": 1, "mode": 0, "pool": 0, "pages": [], "same_as": 0},
            {"space": 0, "mode": 1, "pool": 0, "pages": [], "same_as": 1},
        ],
    ]
    metadata = {key.decode(): value.decode() for key, value in stream.schema.metadata.items()}
    assert metadata["hicache_obs.version"] == "2"
    assert metadata["hicache_obs.engine"] == "demo 1"
    assert metadata["hicache_obs.clock"] == "host"
    assert read_journal(tmp_path).names.streams == {5: "load"}


# -- directories that cannot be used ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_directory_that_cannot_be_written_to_is_named_before_anything_is_written(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError) as raised:
        JournalWriter(tmp_path / place)
    assert str(raised.value).startswith(f"--journal {tmp_path / place}: ")
    assert str(raised.value).endswith("; name a directory this process can write to")
    assert names(tmp_path) == ["file"]


def test_a_read_only_directory(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(journal_writer, "_SegmentFile", refuse)  # permissions do not stop root, who runs CI
    with pytest.raises(ConfigError, match=r"--journal .*: Permission denied; name a directory"):
        JournalWriter(tmp_path)


def test_a_segment_size_that_is_not_allowed(tmp_path):
    with pytest.raises(ConfigError, match=r"journal segment_bytes=0: must be at least 1"):
        JournalWriter(tmp_path, segment_bytes=0)


def test_an_empty_directory(tmp_path):
    with pytest.raises(TraceError, match=r"no journal here: no file is named like rank0-000001.arrows"):
        read_journal(tmp_path)


# -- what is cut off or missing --------------------------------------------------------------------------------


@pytest.mark.slow
def test_cut_at_every_byte_only_whole_batches_are_believed(tmp_path):
    """The file as it is after kill -9 or a power cut: every length inside the last batch, and samples before it."""
    source = tmp_path / "rank0-000001.arrows"
    writer = JournalWriter(tmp_path)
    sizes = [source.stat().st_size]
    for batch in (marks(1, 2), marks(3, 4, 5)):
        writer.write(batch)
        sizes.append(source.stat().st_size)
    whole = source.read_bytes()
    writer.close()
    folder = tmp_path / "cut"
    folder.mkdir()
    copy = folder / source.name
    end = len(whole) + 1
    for size in (*range(0, sizes[-2], 29), *range(sizes[-2] - 2, end)):
        copy.write_bytes(whole[:size])
        batches = sum(size >= end for end in sizes[1:])
        if size < sizes[0]:
            with pytest.raises(TraceError, match="ends before its header is complete; it holds no records"):
                read_journal(folder)
            continue
        trace = read_journal(folder)
        assert ops(trace) == [1, 2, 3, 4, 5][: (0, 2, 5)[batches]], size
        if size in sizes:
            assert trace.notes == ()
        else:
            note = f"{copy}: ends in the middle of batch {batches + 1}; the records before it are whole"
            assert trace.notes == (note,), size


def test_a_killed_writer_leaves_its_whole_batches(tmp_path):
    code = """
import sys
from hicache_obs.readers.journal import JournalWriter
from hicache_obs.records import EventRecord
writer = JournalWriter(sys.argv[1], segment_bytes=20000)
n = 0
while True:
    writer.write([EventRecord(n + k, 0, 0, 1, 2) for k in range(50)])
    n += 50
    print(n, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(30):
            done = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    found = ops(read_journal(tmp_path))
    assert found == list(range(len(found)))
    assert len(found) >= done
    assert len(names(tmp_path)) > 2


def test_a_run_that_died_with_its_header_does_not_hide_the_one_before(tmp_path):
    write(tmp_path, marks(1))
    (tmp_path / "rank0-000002.arrows").write_bytes(b"\xff\xff\xff\xff\x10")
    trace = read_journal(tmp_path)
    assert ops(trace) == [1]
    assert trace.notes == (
        f"{tmp_path / 'rank0-000002.arrows'}: ends before its header is complete; it holds no records",
    )


def test_missing_segments_are_stated_as_lost(tmp_path):
    write(tmp_path, marks(1, 2), marks(3), marks(4, 5, 6), marks(7), segment_bytes=1)
    (tmp_path / "rank0-000001.arrows").unlink()
    (tmp_path / "rank0-000003.arrows").unlink()
    trace = read_journal(tmp_path)
    assert ops(trace) == ["lost 2 MISSING", 3, "lost 3 MISSING", 7]
    assert len(trace.notes) == 2
    assert trace.notes[0].endswith("2 records before it are gone: an earlier segment is missing or damaged")


def test_one_segment_of_a_run_states_what_came_before_it(tmp_path):
    write(tmp_path, marks(1, 2), marks(3), segment_bytes=1)
    trace = read_journal(tmp_path / "rank0-000002.arrows")
    assert ops(trace) == ["lost 2 MISSING", 3]
    assert "segment 2 of its run; names defined earlier are unknown" in trace.notes[0]


def test_a_full_disk_leaves_whole_batches_and_the_loss_is_stated(tmp_path, monkeypatch):
    writer = JournalWriter(tmp_path)
    writer.write(marks(1))
    path = writer.path
    before = path.stat().st_size
    real = writer._segment._file

    class Full:
        def __getattr__(self, name):
            return getattr(real, name)

        def write(self, data):
            real.write(bytes(data)[:100])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer._segment, "_file", Full())
    for batch in (marks(2, 3), marks(4)):
        with pytest.raises(OSError, match="No space left"):
            writer.write(batch)
    assert path.stat().st_size == before
    monkeypatch.setattr(writer._segment, "_file", real)
    writer.write(marks(5))
    writer.close()
    trace = read_journal(tmp_path)
    assert ops(trace) == [1, "lost 3 MISSING", 5]
    assert trace.notes == ()


# -- damage ----------------------------------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"gone.arrows: "):
        read_journal(tmp_path / "gone.arrows")


def test_a_file_of_another_kind(tmp_path):
    path = tmp_path / "rank0-000001.arrows"
    path.write_bytes(b"PAR1" * 100)
    with pytest.raises(TraceError, match=r"not a journal: "):
        read_journal(path)


def arrow_stream(path, schema, *batches):
    with path.open("wb") as file, ipc.new_stream(file, schema) as stream:
        for batch in batches:
            stream.write_batch(batch)


def schema_of(folder):
    write(folder / "template", marks(1))
    with pa.OSFile(str(folder / "template" / "rank0-000001.arrows")) as file:
        stream = ipc.open_stream(file)
        return stream.schema, stream.read_next_batch()


def test_headers_that_are_not_ours(tmp_path):
    path = tmp_path / "x.arrows"
    schema, _ = schema_of(tmp_path)
    meta = dict(schema.metadata)
    arrow_stream(path, pa.schema([("a", pa.int64())]))
    with pytest.raises(TraceError, match=r"Arrow data, but no journal: it states no hicache_obs.version"):
        read_journal(path)
    arrow_stream(path, schema.with_metadata({**meta, b"hicache_obs.version": b"3"}))
    with pytest.raises(TraceError, match=r"journal version 3 is newer than 2, the newest known here; upgrade"):
        read_journal(path)
    arrow_stream(path, schema.with_metadata({**meta, b"hicache_obs.version": b"1"}))
    with pytest.raises(TraceError, match=r"journal version 1 is older than 2, the only one known here; read it with"):
        read_journal(path)
    arrow_stream(path, schema.remove(3).with_metadata(meta))
    with pytest.raises(TraceError, match=r"damaged: its columns are not those of journal version 2"):
        read_journal(path)
    arrow_stream(path, schema.with_metadata({**meta, b"hicache_obs.segment": b"x"}))
    with pytest.raises(TraceError, match=r"damaged header: hicache_obs.segment is 'x', not a number"):
        read_journal(path)


ROW_CELL = {"space": 3, "mode": 0, "pool": 0, "pages": [{"start": 0, "count": 1}], "same_as": None}


def replaced(batch, column, values):
    index = batch.schema.get_field_index(column)
    return batch.set_column(index, batch.schema.field(index), pa.array(values, type=batch.schema.field(index).type))


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("kind", "banana", "record 0: kind 'banana'; known are kernel, memcpy, "),
        ("kind", "memcpy", "record 0 (memcpy): no site"),
        ("event", None, "record 0 (event_record): no event"),
        ("kind", "page_alloc", "record 0 (page_alloc): no owner"),
        ("kind", "graph_node", "record 0 (graph_node): no index"),
        ("kind", "io_begin", "record 0 (io_begin): no io"),
        (
            "accesses",
            [{"space": 9, "mode": 0, "pool": 0, "pages": [], "same_as": None}],
            "access 0: space 9, mode 0; known are spaces 0 to",
        ),
        ("accesses", [ROW_CELL], "record 0 (event_record): a row cell where only accesses belong"),
        (
            "accesses",
            [{"space": 0, "mode": 0, "pool": 0, "pages": [], "same_as": 0}],
            "access 0 has the pages of access 0, which is not before it",
        ),
        (
            "accesses",
            [{"space": 0, "mode": 0, "pool": 0, "pages": [{"start": 0, "count": 1 << 40}], "same_as": None}],
            "page runs of 1099511627776 pages in all",
        ),
        (
            "accesses",
            [{"space": 0, "mode": 0, "pool": 0, "pages": [{"start": 0, "count": 0}], "same_as": None}],
            "page runs of 0 pages in all, the shortest 0; allowed are 1 to 67108864",
        ),
        (
            "accesses",
            [{"space": 0, "mode": 0, "pool": 0, "pages": [{"start": None, "count": 1}], "same_as": None}],
            "a page run without start or count",
        ),
    ],
)
def test_values_that_are_impossible(tmp_path, column, value, text):
    path = tmp_path / "x.arrows"
    schema, batch = schema_of(tmp_path)
    arrow_stream(path, schema, replaced(batch, column, [value]))
    with pytest.raises(TraceError) as raised:
        read_journal(path)
    assert str(raised.value).startswith(f"{path}: batch 1 is damaged: {text}")


@pytest.mark.parametrize("column", ["layer_begin", "layer_end"])
def test_layers_below_zero(tmp_path, column):
    """Refused, not shifted by."""
    path = tmp_path / "x.arrows"
    work = Kernel(OpId(7), ThreadId(0), 0, StreamId(1), 0, 0, 0, (1, 2), ())
    write(tmp_path, [work, work])
    with pa.OSFile(str(tmp_path / "rank0-000001.arrows")) as file:
        stream = ipc.open_stream(file)
        schema, batch = stream.schema, stream.read_next_batch()
    arrow_stream(path, schema, replaced(batch, column, [1, -3]))
    with pytest.raises(TraceError, match=rf"record 1 \(kernel\): {column} -3; must not be negative"):
        read_journal(path)


def test_damage_in_the_middle_is_not_taken_for_the_end(tmp_path):
    write(tmp_path, marks(1), marks(2))
    path = tmp_path / "rank0-000001.arrows"
    data = bytearray(path.read_bytes())
    second = data.rindex(b"\xff\xff\xff\xff", 0, len(data) - 8)
    data[second + 8 : second + 40] = b"\x77" * 32
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"batch 2 is damaged: "):
        read_journal(path)


def test_random_damage_never_escapes_as_another_error(tmp_path):
    write(tmp_path, marks(1, 2, 3), [Define(NO_OP, 0, 0, DefineSpace.STREAM, 1, "s", 1)] * 3)
    path = tmp_path / "rank0-000001.arrows"
    whole = path.read_bytes()
    chance = np.random.default_rng(5)
    copy = tmp_path / "copy.arrows"
    for _ in range(300):
        data = bytearray(whole)
        for place in chance.integers(0, len(data), 3):
            data[place] = chance.integers(0, 256)
        copy.write_bytes(data)
        with suppress(TraceError):
            read_journal(copy)


def test_it_needs_nothing_but_the_files(tmp_path):
    write(tmp_path / "a", marks(1), marks(2), segment_bytes=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    os.rename(tmp_path / "b" / "rank0-000002.arrows", tmp_path / "b" / "rank0-000009.arrows")
    assert ops(read_journal(tmp_path / "b")) == [1, 2]


def test_a_batch_of_every_size_of_access(tmp_path):
    accesses = tuple(device(Mode.READ, np.arange(n)) for n in range(4))
    write(tmp_path, [Memcpy(1, 0, 0, 1, 0, 0, 0, ALL_LAYERS, accesses[:n]) for n in range(5)])
    assert [[len(a.ids) for a in r.accesses] for r in read_journal(tmp_path)] == [
        [],
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
    ]
    assert DropReason.MISSING.name.lower() == "missing"
