"""The ring file: bounds, losses, sharing, modes, damage. Round trips of every kind are in ``tests/readers``."""

from __future__ import annotations

import os
import struct
import threading
from contextlib import closing

import numpy as np
import pytest

from hicache_obs.errors import ConfigError, TraceError
from hicache_obs.readers.ring import RingReader, read_ring
from hicache_obs.readers.ring_header import set_mode
from hicache_obs.recorder import ring as ring_module
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.records import (
    ALL_LAYERS,
    HEADER_BYTES,
    NO_OP,
    SLOT_BYTES,
    CaptureMode,
    Define,
    DefineSpace,
    DropReason,
    EventRecord,
    Kernel,
    Lost,
    Memcpy,
    Mode,
    Ranks,
    RingWord,
    device,
    host,
    pack_rows,
    page_ids,
    unpack_rows,
)


@pytest.fixture
def rings(tmp_path):
    """``rings(slots, words)``: a writer and its reader, closed at the end."""
    made = []

    def make(slots=8, words=64, **options):
        writer = RingWriter(tmp_path / f"{len(made)}.ring", slots=slots, arena_words=words, **options)
        reader = RingReader(writer.path)
        made.append((writer, reader))
        return writer, reader

    yield make
    for writer, reader in made:
        writer.close()
        reader.close()


def mark(op):
    return EventRecord(op, 0, 10 * op, 1, 2)


def round_of(op, *arrays):
    return Kernel(op, 0, 10 * op, 1, 0, 0, 0, ALL_LAYERS, tuple(device(Mode.WRITE, ids) for ids in arrays))


def ops(records):
    return [f"lost {r.count} {r.reason.name}" if isinstance(r, Lost) else int(r.op) for r in records]


def test_the_header_says_who_wrote_it(rings):
    writer, reader = rings(slots=10, words=20, ranks=Ranks(tp=3, pp=1, dp=2), clock=lambda: 12345)
    assert reader.info.pid == os.getpid()
    assert reader.info.ranks == Ranks(3, 1, 2)
    assert (reader.info.slots, reader.info.arena_words) == (10, 20)
    assert reader.info.to_wall_ns(12345 + 7) == reader.info.wall_ns + 7
    assert reader.heartbeat_ns == 12345
    writer.beat(20000)
    assert reader.heartbeat_ns == 20000


def test_a_full_ring_drops_the_newest_and_says_so(rings):
    writer, reader = rings(slots=8)
    kept = [writer.append(mark(op)) for op in range(11)]
    assert kept == [True] * 8 + [False] * 3
    assert writer.dropped == reader.dropped == {DropReason.RING_FULL: 3}
    assert ops(reader.poll()) == list(range(8))
    assert writer.append(mark(20))
    (lost, after) = reader.poll()
    assert (lost.op, lost.count, lost.reason, lost.host_ns) == (NO_OP, 3, DropReason.RING_FULL, 200)
    assert after.op == 20
    assert writer.append(mark(21))
    assert ops(reader.poll()) == [21]


def test_a_loss_is_stated_only_with_room_for_what_follows_it(rings):
    writer, reader = rings(slots=8)
    for op in range(9):
        writer.append(mark(op))
    reader.poll(1)
    assert not writer.append(mark(9))  # one free slot would hold the Lost, and then nothing after it
    reader.poll(1)
    assert writer.append(mark(10))
    assert ops(reader.poll()) == [2, 3, 4, 5, 6, 7, "lost 2 RING_FULL", 10]


def test_several_reasons_give_several_losses(rings):
    writer, reader = rings()
    writer.drop(DropReason.UNRESOLVED, 5)
    writer.drop(DropReason.RECORDER_ERROR)
    writer.append(mark(1))
    assert ops(reader.poll()) == ["lost 5 UNRESOLVED", "lost 1 RECORDER_ERROR", 1]


def test_shared_pages_are_stored_once_and_come_back_as_one_object(rings):
    writer, reader = rings(slots=64, words=64)
    pages, other = np.arange(10), np.arange(10)
    for op in range(40):
        assert writer.append(round_of(op, pages, other))
    records = reader.poll()
    assert {id(r.accesses[0].ids) for r in records} == {id(records[0].accesses[0].ids)}
    assert records[0].accesses[0].ids is not records[0].accesses[1].ids
    assert writer._arena._head == 20
    writer.append(round_of(50, pages))
    assert reader.poll()[0].accesses[0].ids is records[0].accesses[0].ids  # also over two reads


def test_what_was_read_stays_valid_when_the_arena_is_used_again(rings):
    writer, reader = rings(words=16)
    first = None
    for op in range(50):
        assert writer.append(round_of(op, np.full(6, op)))
        (record,) = reader.poll()
        first = record if first is None else first
        assert record.accesses[0].ids.tolist() == [op] * 6
    assert first.accesses[0].ids.tolist() == [0] * 6
    with pytest.raises(ValueError, match="read-only"):
        first.accesses[0].ids[0] = 1


def test_a_remembered_array_keeps_its_pages_until_it_is_forgotten(rings):
    """The pages of a record that was read must not be freed while later records may still refer to them."""
    writer, reader = rings(slots=64, words=256)
    lasting = np.arange(100, 120)
    for op in range(300):
        writer.append(round_of(op, lasting, np.full(3, op)))
        for record in reader.poll():
            assert record.accesses[0].ids.tolist() == lasting.tolist()
            assert record.accesses[1].ids.tolist() == [op] * 3
    assert writer.dropped == {}


def test_pages_of_an_unread_record_are_never_overwritten(rings):
    """They were stored for a record that is long read; what a reader may free is what the writer promised."""
    writer, reader = rings(slots=64, words=64)
    lasting = np.arange(100, 110)
    writer.append(round_of(0, lasting))
    reader.poll()
    writer.append(round_of(1, lasting))
    for op in range(2, 20):
        writer.append(round_of(op, np.full(10, op)))
    assert DropReason.ARENA_FULL in writer.dropped
    records = [r for r in reader.poll() if isinstance(r, Kernel)]
    assert records[0].accesses[0].ids.tolist() == lasting.tolist()
    assert all(r.accesses[0].ids.tolist() == [r.op] * 10 for r in records[1:])


def test_accesses_whose_arrays_were_forgotten_meanwhile_are_stored_again(rings):
    """The second array pushes the first one out while both are being stored."""
    writer, reader = rings(slots=64, words=32)
    small, large = np.arange(4), np.arange(20)
    accesses = (device(Mode.READ, small), device(Mode.WRITE, large))
    for _ in range(6):
        assert writer.append(Kernel(1, 0, 0, 1, 0, 0, 0, ALL_LAYERS, accesses))
        assert reader.poll()[-1].op == 1
        assert writer.append(Kernel(2, 0, 0, 1, 0, 0, 0, ALL_LAYERS, accesses))
        writer.append(round_of(3, np.full(10, 77)))  # has no room beside the two
        first = reader.poll()[0]
        assert [a.ids.tolist() for a in first.accesses] == [small.tolist(), large.tolist()]


def test_the_order_of_stores_that_two_processes_rely_on(rings):
    """Arena claimed, slot filled, then HEAD, then ARENA_LOW; a reader may look in between any two of them."""
    writer, _reader = rings(slots=64, words=16)
    words, stores = writer._words, []

    class Spy:
        def __getitem__(self, word):
            return words[word]

        def __setitem__(self, word, value):
            slot = bytes(writer._map[HEADER_BYTES + SLOT_BYTES : HEADER_BYTES + SLOT_BYTES + 1])
            stores.append(
                (RingWord(word).name, "slot filled" if slot != b"\0" else "slot empty", writer._arena._ids[9])
            )
            words[word] = value

    writer.append(mark(0))
    writer._words = writer._arena._words = Spy()
    writer.append(Memcpy(1, 0, 0, 1, 0, 0, 0, ALL_LAYERS, (device(Mode.READ, np.full(10, 7)),)))
    writer._words = writer._arena._words = words
    assert stores == [
        ("ARENA_HEAD", "slot empty", 0),
        ("HEAD", "slot filled", 7),
        ("ARENA_LOW", "slot filled", 7),
    ]


def test_a_full_arena_drops_by_its_own_reason_and_recovers(rings):
    writer, reader = rings(slots=64, words=32)
    assert writer.append(round_of(0, np.arange(30)))
    assert not writer.append(round_of(1, np.arange(30)))
    assert not writer.append(round_of(2, np.arange(33)))  # never fits
    assert writer.append(mark(3))  # needs no arena
    assert writer.dropped == {DropReason.ARENA_FULL: 2}
    assert ops(reader.poll()) == [0, "lost 1 ARENA_FULL", "lost 1 ARENA_FULL", 3]
    reader.poll()
    assert writer.append(round_of(4, np.arange(32)))
    assert reader.poll()[0].accesses[0].ids.tolist() == list(range(32))


def test_an_array_larger_than_what_may_stay_taken_is_not_shared_but_not_lost(rings):
    writer, reader = rings(slots=64, words=32)
    pages = np.arange(20)
    for op in range(20):
        assert writer.append(round_of(op, pages))
        reader.poll()
        reader.poll()
    assert writer.dropped == {}


def test_arrays_wrap_around_the_end_of_the_arena(rings):
    writer, reader = rings(words=20)
    for op in range(30):
        pages = page_ids(range(100 * op, 100 * op + 7))
        assert writer.append(round_of(op, pages))
        (record,) = reader.poll()
        assert record.accesses[0].ids.tolist() == pages.tolist()


def test_the_same_tuple_of_accesses_is_packed_once_and_never_wrongly(rings):
    writer, reader = rings(slots=64, words=64)
    accesses = (device(Mode.READ, np.arange(5)), host(Mode.WRITE, np.arange(5, 9)))
    for op in range(100):
        layer = (op, op + 1)
        writer.append(Kernel(op, 0, 0, 1, 0, 0, 0, layer, accesses))
        if op % 3 == 0:
            writer.append(round_of(1000 + op, np.full(9, op)))  # pushes older arrays out
        for record in reader.poll():
            if record.op < 1000:
                assert [a.ids.tolist() for a in record.accesses] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
            else:
                assert record.accesses[0].ids.tolist() == [record.op - 1000] * 9


def test_a_malformed_record_raises_and_leaves_nothing(rings):
    writer, reader = rings()
    good = (device(Mode.READ, np.arange(3)),)
    bad = Kernel(1, 0, 0, 1, 0, 0, 0, ALL_LAYERS, (*good, device(Mode.READ, None)))  # type: ignore[arg-type] # on purpose
    for _ in range(2):
        with pytest.raises(TypeError):
            writer.append(bad)
    with pytest.raises(IndexError):
        writer.append(Kernel(1, 0, 0, 1, 0, 0, 0, ALL_LAYERS, good * 5))
    with pytest.raises(struct.error):
        writer.append(EventRecord(1, -1, 0, 1, 2))
    with pytest.raises(KeyError):
        writer.append("no record")  # type: ignore[arg-type] # on purpose
    assert reader.poll() == []
    assert writer.append(mark(2))
    assert ops(reader.poll()) == [2]


def test_switched_off_it_keeps_nothing_and_states_the_gap(rings):
    writer, reader = rings()
    writer.append(mark(0))
    assert set_mode(writer.path, CaptureMode.OFF) is CaptureMode.OBSERVE
    assert (writer.mode, reader.mode) == (CaptureMode.OFF, CaptureMode.OFF)
    assert not writer.append(mark(1))
    assert not writer.append(mark(2))
    reader.mode = CaptureMode.ENFORCE
    assert writer.mode is CaptureMode.ENFORCE
    writer.append(mark(3))
    assert ops(reader.poll()) == [0, "lost 2 SWITCHED_OFF", 3]


def test_append_from_within_append_is_refused_not_deadlocked(rings):
    """A signal handler runs between two bytecodes of its own thread, also inside append."""
    writer, reader = rings()

    class Handler:
        def __index__(self):
            assert not writer.append(mark(99))
            writer.close()
            return 5

    writer.append(EventRecord(1, 0, 0, 1, Handler()))  # type: ignore[arg-type] # on purpose
    assert not writer.append(mark(2))  # the handler closed it
    assert ops(reader.poll()) == [1]
    assert reader.dropped == {DropReason.RECORDER_ERROR: 1}


def test_many_threads_append_whole_records(rings):
    writer, reader = rings(slots=4096, words=1 << 16)
    each = 400

    def work(thread):
        for number in range(each):
            writer.append(
                Kernel(
                    number, thread, thread * 7, thread, 0, 0, 0, ALL_LAYERS, (device(Mode.READ, np.full(5, thread)),)
                )
            )

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    found = []
    while any(thread.is_alive() for thread in threads):
        found += reader.poll()
    found += reader.poll()
    assert len(found) == 6 * each
    for n in range(6):
        mine = [r for r in found if r.thread == n]
        assert [r.op for r in mine] == list(range(each))
        assert all((r.stream, r.host_ns, r.accesses[0].ids.tolist()) == (n, 7 * n, [n] * 5) for r in mine)


def test_the_way_of_publishing_for_weakly_ordered_processors(rings, monkeypatch):
    monkeypatch.setattr(ring_module, "_STRONG_ORDER", False)
    writer, reader = rings()
    for op in range(20):
        assert writer.append(mark(op))
        assert ops(reader.poll()) == [op]


def test_a_closed_writer_is_inert_and_the_file_stays(rings):
    writer, reader = rings()
    writer.append(mark(1))
    writer.close()
    writer.close()
    assert not writer.writable
    assert not writer.append(mark(2))
    writer.drop(DropReason.UNRESOLVED)
    writer.beat(5)
    assert (writer.mode, writer.dropped) == (CaptureMode.OFF, {})
    assert ops(reader.poll()) == [1]


def test_a_ring_is_never_overwritten(tmp_path):
    path = tmp_path / "x.ring"
    RingWriter(path, slots=8, arena_words=16).close()
    with pytest.raises(ConfigError, match=r"exists already, and a ring is never overwritten"):
        RingWriter(path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slots": 7}, "ring slots=7: must be from 8 to 16777216"),
        ({"arena_words": 15}, "ring arena_words=15: must be from 16 to 1073741824"),
        ({"arena_words": 2**31}, "ring arena_words=2147483648: must be from 16 to 1073741824"),
    ],
)
def test_sizes_that_are_not_allowed(tmp_path, options, text):
    with pytest.raises(ConfigError) as raised:
        RingWriter(tmp_path / "x.ring", **options)
    assert str(raised.value) == text
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"ring file .*file/x.ring: Not a directory .*choose a directory"):
        RingWriter(tmp_path / "file" / "x.ring")


def test_a_full_disk_is_noticed_before_anything_is_recorded(tmp_path, monkeypatch):
    """Blocks are reserved up front: a hole that cannot be filled later would kill the server with SIGBUS."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"No space left on device \(16781312 bytes are needed\)"):
        RingWriter(tmp_path / "x.ring")
    assert not list(tmp_path.iterdir())


def test_one_reader_per_ring(rings):
    writer, _reader = rings()
    with pytest.raises(TraceError, match="another agent reads this ring"):
        RingReader(writer.path)


# -- reading what was left behind ------------------------------------------------------------------------------


def test_read_ring_changes_nothing_and_sees_what_was_read_too(rings):
    writer, reader = rings(slots=8)
    for op in range(5):
        writer.append(mark(op))
    reader.poll()
    for op in range(5, 7):
        writer.append(mark(op))
    before = writer.path.read_bytes()
    trace = read_ring(writer.path)
    assert ops(trace) == list(range(7))
    assert trace.notes == ()
    assert writer.path.read_bytes() == before


def test_read_ring_states_what_is_overwritten(rings):
    writer, reader = rings(slots=8)
    for op in range(20):
        writer.append(mark(op))
        reader.poll()
    trace = read_ring(writer.path)
    assert ops(trace) == ["lost 13 MISSING", *range(13, 20)]  # the slot that is next may be half overwritten
    assert "the oldest 13 records are no longer in the ring" in trace.notes[0]


def test_read_ring_does_not_believe_records_whose_pages_are_overwritten(rings):
    writer, reader = rings(slots=64, words=16)
    for op in range(12):
        writer.append(round_of(op, np.full(4, op)))
        reader.poll()
    trace = read_ring(writer.path)
    assert ops(trace) == ["lost 8 MISSING", 8, 9, 10, 11]
    assert [r.accesses[0].ids.tolist() for r in trace.records[1:]] == [[op] * 4 for op in range(8, 12)]


def test_read_ring_states_losses_that_nothing_followed(rings):
    writer, _reader = rings(slots=8)
    for op in range(10):
        writer.append(mark(op))
    assert ops(read_ring(writer.path)) == [*range(8), "lost 2 RING_FULL"]


def test_read_ring_resolves_names(rings):
    writer, _reader = rings()
    writer.append(Define(NO_OP, 0, 0, DefineSpace.STREAM, 4, "forward", 1))
    writer.append(Define(NO_OP, 0, 0, DefineSpace.POOL, 0, "kv", 3))
    names = read_ring(writer.path).names
    assert names.streams == {4: "forward"}
    assert names.stream_kinds[4].name == "BLOCKING"
    assert (names.pools, names.pool_layers) == ({0: "kv"}, {0: 3})
    assert names.stream(5) == "stream 5"


def test_rows_beside_four_accesses_are_left_out(rings):
    """A slot has four cells. The round itself is kept."""
    writer, _reader = rings(slots=8, words=64)
    rows = pack_rows([7], [np.arange(2)], [2], [1])
    for count in (3, 4):
        full = round_of(0, *(np.arange(n, n + 2) for n in range(count)))
        assert writer.append(Kernel(0, 0, 0, 1, 0, 0, 0, ALL_LAYERS, full.accesses, rows))
    three, four = read_ring(writer.path)
    assert (len(three.accesses), three.rows.tolist()) == (3, rows.tolist())
    assert (len(four.accesses), four.rows) == (4, None)


def test_rows_without_room_are_left_out(rings):
    """Rows are worth less than the round they belong to."""
    writer, _reader = rings(slots=8, words=16)
    rows = pack_rows([7], [np.arange(20)], [2], [1])
    assert writer.append(Kernel(0, 0, 0, 1, 0, 0, 0, ALL_LAYERS, round_of(0, np.arange(2)).accesses, rows))
    (kept,) = read_ring(writer.path)
    assert (kept.accesses[0].ids.tolist(), kept.rows) == ([0, 1], None)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], "0 numbers for -1 rows"),
        ([-1], "1 numbers for -1 rows"),
        ([2, 1, 1, 1, 1], "5 numbers for 2 rows"),
        ([1, 7, 2, 1, 1, 5], "rows of 2 pages; 1 are there"),
        ([1, 7, -1, 0, 0], "rows of -1 pages; 0 are there"),
        ([1, 7, 1, 2, 1, 5], "a row reads or writes more pages than it has"),
        ([1, 7, 1, 1, -1, 5], "a row reads or writes more pages than it has"),
    ],
)
def test_what_are_no_rows(numbers, text):
    with pytest.raises(ValueError, match=text):
        unpack_rows(np.array(numbers, np.int64))


DAMAGE = [
    (0, b"nonsense", "not a ring: it begins with b'nonsense', not b'hicaring'"),
    (8 * RingWord.VERSION, b"\x04", "ring layout 4 is newer than 3, the newest known here; upgrade"),
    (
        8 * RingWord.VERSION,
        b"\x01",
        "ring layout 1 is older than 3, the only one known here; read it with the version that wrote it",
    ),
    (8 * RingWord.VERSION, b"\x00", "damaged header: layout 0 with 128 bytes per slot"),
    (8 * RingWord.SLOTS, b"\0" * 8, "damaged header: 0 slots; must be from 1 to 16777216"),
    (8 * RingWord.SLOTS, b"\x40", "cut short: 5248 bytes of 12416"),
    (8 * RingWord.ARENA_WORDS + 7, b"\x80", "damaged header: -9223372036854775792 arena words"),
    (8 * RingWord.SLOT_BYTES, b"\x40", "damaged header: layout 3 with 64 bytes per slot"),
    (8 * RingWord.TP_RANK, b"\xff" * 8, "damaged header: tp rank -1; must be from 0 to 1048575"),
    (8 * RingWord.HEAD + 7, b"\x80", "damaged header: 0 records read of -"),
    (8 * RingWord.TAIL, b"\x09", "damaged header: 9 records read of 2 written"),
    (HEADER_BYTES, b"\x50", "record 0 is damaged: kind 80; known are 0 to 25"),
    (HEADER_BYTES + 1, b"\x05", "record 0 is damaged: 5 accesses; at most 4 fit"),
    (HEADER_BYTES + 64, b"\x04", "record 0 is damaged: space 4; known are 0 to 2"),
    (HEADER_BYTES + 64, b"\x03", "record 0 is damaged: rows of 0 pages; 2 are there"),
    (HEADER_BYTES, b"\x19", "record 0 is damaged: space 0 where a row cell (3) belongs"),
    (HEADER_BYTES + 65, b"\x02", "record 0 is damaged: access mode 2; known are 0 to 1"),
    (HEADER_BYTES + 68, b"\xff", "record 0 is damaged: 255 page ids at arena position 0, which ends at 3"),
    (HEADER_BYTES + 72, b"\x01", "record 0 is damaged: 3 page ids at arena position 1, which ends at 3"),
    (HEADER_BYTES + SLOT_BYTES + 2, b"\x41", "record 1 is damaged: a text of 65 bytes; at most 64 fit"),
    (HEADER_BYTES + SLOT_BYTES + 64, b"\xff", "record 1 is damaged: 'utf-8' codec can't decode"),
    (HEADER_BYTES + SLOT_BYTES + 40, b"\x77", "record 1 is damaged: definition space 119; known are 0 to 20"),
    (HEADER_BYTES + SLOT_BYTES + 32, b"\x07", "record 1 is damaged: stream kind 7; known are 0 to 2"),
]


@pytest.mark.parametrize(("place", "data", "text"), DAMAGE)
def test_damage_is_named(tmp_path, place, data, text):
    path = tmp_path / "x.ring"
    writer = RingWriter(path, slots=8, arena_words=16)
    writer.append(round_of(0, np.arange(3)))
    writer.append(Define(NO_OP, 0, 0, DefineSpace.STREAM, 4, "forward", 1))
    writer.close()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)
    with pytest.raises(TraceError) as raised:
        read_ring(path)
    assert str(raised.value).startswith(f"{path}: {text}")
    with pytest.raises(TraceError), closing(RingReader(path)) as reader:
        list(iter(reader.poll, []))  # the records before the damage are good


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 8 * SLOT_BYTES + 127])
def test_a_file_cut_short_is_refused(tmp_path, size):
    path = tmp_path / "x.ring"
    RingWriter(path, slots=8, arena_words=16).close()
    os.truncate(path, size)
    with pytest.raises(TraceError, match=r"not a ring|cut short"):
        read_ring(path)
    with pytest.raises(TraceError, match=r"not a ring|cut short"):
        RingReader(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"gone.ring: No such file"):
        read_ring(tmp_path / "gone.ring")
