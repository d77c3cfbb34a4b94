"""Whatever is written to a ring or a journal is read back field by field, and arrays that were one object still are."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hicache_obs.readers import parquet
from hicache_obs.readers.journal import JournalInfo, JournalWriter, read_journal
from hicache_obs.readers.ring import RingReader, read_ring
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.recorder.slot import cut_text
from hicache_obs.records import (
    IN_ORDER,
    KINDS,
    MAX_IDS,
    MAX_NODES,
    MAX_TEXT_BYTES,
    Access,
    Collective,
    Define,
    DefineSpace,
    Direction,
    DropReason,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    GraphNode,
    GraphReplay,
    HostAccess,
    HostSync,
    IoBegin,
    IoEnd,
    IoKind,
    Kernel,
    Lost,
    Memcpy,
    Mode,
    PageAlloc,
    PageFree,
    Purpose,
    RecordStream,
    Relocate,
    RowsDiscarded,
    Space,
    TensorAlloc,
    TensorFree,
    ThreadPost,
    ThreadRecv,
    Times,
    WaitStream,
    pack_rows,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
OP = st.integers(-1, 2**63 - 1)
LAYERS = st.tuples(st.integers(0, 80), st.integers(1, 2**31 - 1))
ARRAY = st.one_of(
    st.lists(st.integers(0, MAX_IDS - 1), max_size=12, unique=True),
    st.builds(lambda start, count: list(range(start, start + count)), st.integers(0, MAX_IDS - 41), st.integers(0, 40)),
    st.lists(st.sampled_from((0, MAX_IDS - 1)), max_size=2, unique=True),
).map(lambda ids: np.array(ids, dtype=np.int64))


@st.composite
def row_arrays(draw):
    """What ``pack_rows`` makes."""
    pages = draw(st.lists(ARRAY, max_size=3))
    counts = [draw(st.integers(0, len(ids))) for ids in pages * 2]
    requests = draw(st.lists(st.integers(0, 2**40), min_size=len(pages), max_size=len(pages)))
    return pack_rows(requests, pages, counts[: len(pages)], counts[len(pages) :])


@st.composite
def histories(draw, min_size=0, max_size=30):
    """Records that share arrays out of a small stock, as an engine's do."""
    arrays = st.sampled_from(draw(st.lists(ARRAY, min_size=1, max_size=5)))
    access = st.builds(Access, st.sampled_from(Space), st.sampled_from(Mode), arrays, st.integers(0, 2**16 - 1))
    base = (OP, st.integers(0, 2**32 - 1), INT64)
    several = st.lists(access, max_size=4).map(tuple)
    work = (*base, INT64, INT64, INT64, INT64, LAYERS, several)
    # With four accesses a ring has no room for the rows.
    rows = st.none() | st.sampled_from(draw(st.lists(row_arrays(), min_size=1, max_size=2)))
    round_work = (*work[:-1], st.lists(access, max_size=3).map(tuple), rows)
    define = st.builds(Define, *base, st.sampled_from(DefineSpace), INT64, st.text(max_size=16), INT64)
    fields = {
        Kernel: round_work,
        Memcpy: (*work, st.sampled_from(Direction)),
        EventRecord: (*base, INT64, INT64),
        EventWait: (*base, INT64, INT64, st.sampled_from(Purpose)),
        WaitStream: (*base, INT64, INT64, st.sampled_from(Purpose)),
        EventQuery: (*base, INT64, st.booleans()),
        EventSync: (*base, INT64),
        HostSync: (*base, st.none() | INT64),
        HostAccess: (*base, INT64, LAYERS, several),
        PageAlloc: (*base, INT64, access),
        PageFree: (*base, INT64, access),
        RecordStream: (*base, INT64, INT64),
        Times: (*base, INT64, INT64, INT64),
        Lost: (*base, INT64, st.sampled_from(DropReason)),
        GraphReplay: (*base, INT64, INT64, INT64, INT64, st.integers(0, 2**16 - 1), LAYERS, several),
        GraphNode: (
            *base,
            st.integers(63, MAX_NODES - 1),
            st.integers(IN_ORDER, 2**63 - 1),
            st.none() | INT64,
            LAYERS,
            several,
        ),
        Relocate: (*base, INT64, INT64, LAYERS, several),
        IoBegin: (*base, INT64, st.sampled_from(IoKind), INT64, LAYERS, several),
        IoEnd: (*base, INT64),
        ThreadPost: (*base, INT64),
        ThreadRecv: (*base, INT64),
        TensorAlloc: (*base, INT64, INT64, INT64),
        TensorFree: (*base, INT64),
        Collective: (*base, INT64, INT64, INT64),
        RowsDiscarded: (*base, INT64, arrays),
    }
    record = st.one_of(
        *(st.builds(kind, *fields[kind]) for kind in KINDS if kind is not Define),
        define.filter(lambda r: r.space is not DefineSpace.STREAM),
        st.builds(Define, *base, st.just(DefineSpace.STREAM), INT64, st.text(max_size=16), st.sampled_from([0, 1, 2])),
    )
    return draw(st.lists(record, min_size=min_size, max_size=max_size))


def accesses(record):
    return (record.access,) if isinstance(record, (PageAlloc, PageFree)) else getattr(record, "accesses", ())


def assert_same(expected, found, *, room=True):
    """Equal field by field, types of enums included, arrays by content. A ring without ``room`` leaves rows out."""
    assert [type(record) for record in found] == [type(record) for record in expected]
    for want, got in zip(expected, found, strict=True):
        for field in type(want).__struct_fields__:
            if field == "rows" and got.rows is None and not room:
                continue
            if field in ("rows", "requests"):
                assert (getattr(got, field) is None) == (getattr(want, field) is None)
                assert np.array_equal(getattr(got, field), getattr(want, field))
            elif field not in ("access", "accesses"):
                assert getattr(got, field) == getattr(want, field), field
                assert type(getattr(got, field)) is type(getattr(want, field)), field
        assert len(accesses(got)) == len(accesses(want))
        for a, b in zip(accesses(want), accesses(got), strict=True):
            assert (b.space, b.mode, b.pool) == (a.space, a.mode, a.pool)
            assert isinstance(b.space, Space)
            assert isinstance(b.mode, Mode)
            assert b.ids.dtype == np.int64
            assert b.ids.tolist() == a.ids.tolist()


def arrays_of(records):
    """Arrays that records carry, empty ones aside."""
    found = []
    for record in records:
        rows = getattr(record, "rows", None) if isinstance(record, Kernel) else getattr(record, "requests", None)
        found += [access.ids for access in accesses(record)] + ([] if rows is None else [rows])
    return [ids for ids in found if len(ids)]


def sharing(records):
    """Which records carry the same array object."""
    first: dict[int, int] = {}
    arrays = arrays_of(records)
    return [first.setdefault(id(ids), number) for number, ids in enumerate(arrays)]


@pytest.mark.slow
def test_the_strategy_makes_every_kind():
    """Within 300 histories; the rest of them are not made."""
    seen = set()

    class Complete(Exception):
        """Every kind was seen."""

    @settings(max_examples=300, deadline=None, database=None, phases=[Phase.generate])
    @given(histories(min_size=8))
    def collect(history):
        seen.update(type(record) for record in history)
        if seen == set(KINDS):
            raise Complete

    with pytest.raises(Complete):
        collect()


@settings(deadline=None, max_examples=100)
@given(histories())
def test_ring(history):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.ring"
        writer = RingWriter(path, slots=64, arena_words=4096)
        reader = RingReader(path)
        assert all(writer.append(record) for record in history)
        left_behind = read_ring(path)
        found = reader.poll()
        assert reader.poll() == []
        writer.close()
        reader.close()
    assert_same(history, found)
    assert sharing(found) == sharing(history)
    assert_same(history, list(left_behind))
    assert sharing(left_behind) == sharing(history)
    assert left_behind.notes == ()


@settings(deadline=None, max_examples=40)
@given(st.lists(histories(min_size=1, max_size=8), max_size=5), st.sampled_from([1, 2000, 1 << 20]))
def test_journal(batches, segment_bytes):
    with tempfile.TemporaryDirectory() as folder:
        writer = JournalWriter(folder, segment_bytes=segment_bytes)
        for batch in batches:
            writer.write(batch)
        writer.close()
        found = read_journal(folder)
    assert_same([record for batch in batches for record in batch], list(found))
    assert found.notes == ()
    start = 0
    for batch in batches:
        assert sharing(found.records[start : start + len(batch)]) == sharing(batch)
        start += len(batch)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.lists(histories(min_size=1, max_size=8), max_size=5), st.sampled_from([1, 3, 1 << 14]))
def test_journal_to_parquet_to_journal(batches, group):
    """Equal to the last field; equal page sets of one row group are one array."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "MAX_ROWS", group)
        path = Path(folder) / "x.parquet"
        info = JournalInfo(rank=3, run="r", engine="e 1", clock="c", wall_ns=5, host_ns=6)
        assert parquet.write_parquet(path, batches, info) == sum(map(len, batches))
        assert parquet.parquet_info(path) == info
        found = list(parquet.parquet_batches(path))
        assert all(len(records) <= group for records in found)
        writer = JournalWriter(Path(folder) / "journal")
        for records in found:
            writer.write(records)
        writer.close()
        again = read_journal(Path(folder) / "journal")
    expected = [record for batch in batches for record in batch]
    assert_same(expected, [record for records in found for record in records])
    assert_same(expected, list(again))
    for records in found:
        arrays = [access.ids for record in records for access in getattr(record, "accesses", ())]
        assert len({id(ids) for ids in arrays}) == len({ids.tobytes() for ids in arrays})


@settings(deadline=None, max_examples=100)
@given(
    histories(max_size=60),
    st.lists(st.integers(0, 6), min_size=1, max_size=8),
    st.sampled_from([8, 12, 16]),
    st.sampled_from([16, 24, 64]),
)
def test_a_small_ring_loses_records_but_never_mixes_them_up(history, reads, slots, words):
    """Reads ``reads[i]`` records (0: none) after the i-th write; what arrives is what was kept, and losses add up."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.ring"
        writer = RingWriter(path, slots=slots, arena_words=words)
        reader = RingReader(path)
        history = [record for record in history if not isinstance(record, Lost)]
        kept, found = [], []
        for number, record in enumerate(history):
            if writer.append(record):
                kept.append(record)
            limit = reads[number % len(reads)]
            if limit:
                found += reader.poll(limit)
        while more := reader.poll(3):
            found += more
        assert reader.poll() == []  # what was promised meanwhile is free now
        end = EventSync(1, 2, 3, 4)
        assert writer.append(end)
        found += reader.poll()
        dropped = writer.dropped
        assert dropped == reader.dropped
        writer.close()
        reader.close()
    assert_same([*kept, end], [record for record in found if not isinstance(record, Lost)], room=False)
    stated = dict.fromkeys(dropped, 0)
    for record in found:
        if isinstance(record, Lost):
            stated[record.reason] += record.count
    assert stated == dropped
    assert sum(dropped.values()) == len(history) - len(kept)
    if all(getattr(want, "rows", None) is None for want in kept):  # else rows may have been left out
        for mine, theirs in zip(sharing_pairs(kept), sharing_pairs(found), strict=True):
            assert theirs <= mine  # never shared without having been shared


def sharing_pairs(records):
    arrays = arrays_of(record for record in records if not isinstance(record, Lost))
    return [{j for j in range(i) if arrays[j] is arrays[i]} for i in range(len(arrays))]


@given(st.text(max_size=80))
def test_a_long_text_is_cut_on_a_character_boundary(text):
    cut = cut_text(text)
    assert len(cut) <= MAX_TEXT_BYTES
    whole = text.encode("utf-8", "replace")
    assert cut == whole if len(whole) <= MAX_TEXT_BYTES else len(cut) > MAX_TEXT_BYTES - 4
    assert text.encode("utf-8", "replace").decode().startswith(cut.decode())


def test_a_long_text_survives_a_ring(tmp_path):
    writer = RingWriter(tmp_path / "x.ring", slots=8, arena_words=16)
    writer.append(Define(0, 0, 0, DefineSpace.SITE, 3, "é" * 40, 0))
    (define,) = read_ring(tmp_path / "x.ring")
    assert define.text == "é" * 32
    writer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_records_stay_cheap_to_make(kind):
    """Not dataclasses: making one must not cost a fifth of a round's budget."""
    assert not hasattr(kind, "__dataclass_fields__")
    assert not hasattr(kind, "__dict__") or "__dict__" not in kind.__dict__
