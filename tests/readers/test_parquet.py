"""Parquet files of records: read by other tools, of bounded memory, and refused where they are not ours."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from hicache_obs.errors import TraceError
from hicache_obs.readers import open_trace, parquet
from hicache_obs.readers.journal_format import COLUMNS, FIELDS, KIND_NAMES, JournalInfo
from hicache_obs.records import Kernel, Mode, OpId, StreamId, ThreadId, device
from hicache_obs.testing import History


def kernel(number: int, pages: Any) -> Kernel:
    """A round that writes ``pages``."""
    access = device(Mode.WRITE, np.asarray(pages, np.int64))
    return Kernel(OpId(number), ThreadId(1), number, StreamId(1), 0, 0, 0, (0, 1), (access,))


def written(path: Path, records: Any) -> Path:
    """A file of ``records``."""
    parquet.write_parquet(path, [list(records)], JournalInfo(rank=1))
    return path


def test_a_row_states_its_own_pages(tmp_path: Path) -> None:
    """So that SQL over the file needs no row before it: the two accesses share an array, and both have runs."""
    pages = np.array([3, 4, 5, 9], np.int64)
    path = written(tmp_path / "x.parquet", [kernel(1, pages), kernel(2, pages)])

    rows = pq.read_table(path, columns=["kind", "op", "accesses"]).to_pylist()
    for number, row in enumerate(rows, 1):
        (access,) = row["accesses"]
        assert (row["kind"], row["op"]) == ("kernel", number)
        assert access["pages"] == [{"start": 3, "count": 3}, {"start": 9, "count": 1}]
        assert access["same_as"] is None


def test_row_groups_are_bounded_by_rows_and_by_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_GROUP_IDS", 10)
    path = written(tmp_path / "x.parquet", (kernel(n, range(size)) for n, size in enumerate((4, 4, 4, 30, 1, 9, 1))))

    sizes = [[len(record.accesses[0].ids) for record in group] for group in parquet.parquet_batches(path)]
    assert sizes == [[4, 4], [4], [30], [1, 9], [1]]


def test_it_is_written_without_holding_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the first row group is in the file, no more than the second has been asked for."""
    monkeypatch.setattr(parquet, "MAX_ROWS", 5)
    asked = itertools.count()
    seen: list[int] = []
    write = parquet.record_batch

    def batches() -> Any:
        for number in range(20):
            next(asked)
            yield [kernel(number, [number])]

    def noted(records: Any, **options: Any) -> Any:
        seen.append(int(repr(asked)[6:-1]))
        return write(records, **options)

    monkeypatch.setattr(parquet, "record_batch", noted)
    parquet.write_parquet(tmp_path / "x.parquet", batches(), JournalInfo())
    assert seen == [6, 11, 16, 20]


def foreign(path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), path)


def newer(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"hicache_obs.version": b"99"}), path)


def other_columns(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["op"]).replace_schema_metadata(table.schema.metadata), path)


def odd_value(path: Path) -> None:
    table = pq.read_table(path)
    kinds = pa.array(["define", "oops"])
    place = table.schema.get_field_index("kind")
    pq.write_table(table.set_column(place, "kind", kinds).replace_schema_metadata(table.schema.metadata), path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (foreign, "x.parquet: Arrow data, but no journal: it states no hicache_obs.version"),
        (newer, "x.parquet: journal version 99 is newer than 2"),
        (other_columns, "x.parquet: damaged: its columns are not those of journal version 2"),
        (odd_value, "x.parquet: row group 1 is damaged: record 1: kind 'oops'"),
        (lambda path: path.write_bytes(b"PAR1" + bytes(99)), "x.parquet: not a Parquet file: "),
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "x.parquet: not a Parquet file: "),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"host_ns", b"host_\xffs")),
            "x.parquet: not a Parquet file: ",
        ),
    ],
)
def test_what_is_not_ours_is_refused(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    path = written(tmp_path / "x.parquet", History("F:w1 L:w1").records[:2])
    damage(path)

    with pytest.raises(TraceError) as error:
        open_trace(path)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_row_group_that_claims_too_much_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "x.parquet", [kernel(1, [1])])
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 100)

    with pytest.raises(TraceError, match=r"x.parquet: row group 1 has \d+ bytes; allowed are 100"):
        open_trace(path)


def test_a_folder_with_several_ranks_wants_one_named(tmp_path: Path) -> None:
    for rank in (0, 4):
        written(tmp_path / f"rank{rank}.parquet", [kernel(rank, [1])])

    assert open_trace(tmp_path, rank=4).records[0].op == 4
    with pytest.raises(TraceError, match="holds the records of ranks 0, 4: say which one"):
        open_trace(tmp_path)
    with pytest.raises(TraceError, match="holds no records of rank 2, only of 0, 4"):
        open_trace(tmp_path, rank=2)


def test_the_columns_are_documented(checkout: Path) -> None:
    page = (checkout / "docs" / "formats.md").read_text()

    for name, type_ in COLUMNS:
        kinds = [KIND_NAMES[kind] for kind, fields in FIELDS.items() if name in dict(fields)]
        where = ", ".join(f"`{kind}`" for kind in kinds) or "all"
        assert f"| `{name}` | {type_} | {where} |\n" in page
    for name in JournalInfo.__dataclass_fields__:
        assert f"`hicache_obs.{name}`" in page or f"`.{name}`" in page
