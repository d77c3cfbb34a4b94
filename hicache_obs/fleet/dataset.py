"""``write_dataset``: a fleet's results as a folder of Parquet tables, a file per rank and table.

::

    ranks/      a row per rank            findings/  a row per fingerprint       fences/  a row per kind of transfer
    coverage/   a row per hazard checked, and per reason of lost records
    comparisons/, divergences/, clocks/   of all ranks, one file each

A file is called after the rank's place in the order of all ranks; column ``rank`` is its name. Written anew as a whole
(``hicache_obs.whole_file``), so nobody sees half of one. The same results give the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import parquet

from hicache_obs.analyzer.tally import DEFINITE
from hicache_obs.costs import TransferKind
from hicache_obs.errors import ConfigError
from hicache_obs.findings import Verdict
from hicache_obs.fleet.rank import MAX_LONG, RankSummary
from hicache_obs.fleet.run import Fleet
from hicache_obs.fleet.verdict import Judged

MARK: Final = "_hicache_obs_fleet"
"""A file in every such folder: what tells it from one that must not be replaced. Readers of Parquet skip it."""
_TEXT, _LONG, _TRUE = pa.string(), pa.int64(), pa.bool_()
_WHO: Final = (("rank", _TEXT), ("node", _TEXT), ("dp", _LONG), ("pp", _LONG), ("tp", _LONG))
_VERDICTS: Final = (*DEFINITE, Verdict.UNKNOWN)
_PER_VERDICT: Final = tuple((verdict.value, _LONG) for verdict in _VERDICTS)
SCHEMAS: Final = {
    "ranks": pa.schema([
        *_WHO, ("role", _TEXT), ("place", _TEXT), ("outcome", _TEXT), ("error", _TEXT), ("records", _LONG),
        ("pairs_checked", _LONG), *_PER_VERDICT, ("transfers", _LONG), ("begin_ns", _LONG), ("end_ns", _LONG),
        ("wall_ahead_ns", _LONG), ("engine", _TEXT), ("version", _TEXT), ("notes", pa.list_(_TEXT)),
    ]),
    "findings": pa.schema([
        *_WHO, ("fingerprint", _TEXT), ("hazard", _TEXT), ("cause", _TEXT), ("verdict", _TEXT), ("accepted", _TRUE),
        *_PER_VERDICT, ("earlier_op", _LONG), ("later_op", _LONG), ("earlier_site", _TEXT), ("later_site", _TEXT),
        ("text", _TEXT),
    ]),
    "fences": pa.schema([
        *_WHO, ("op", _TEXT), ("count", _LONG), ("in_flight", _LONG), ("waited_ns", _LONG), ("avoidable_ns", _LONG),
        ("needed_ns", pa.map_(_TEXT, _LONG)), ("p50_ns", _LONG), ("p99_ns", _LONG), ("max_ns", _LONG),
    ]),
    "coverage": pa.schema([*_WHO, ("what", _TEXT), ("name", _TEXT), ("count", _LONG)]),
    "comparisons": pa.schema([
        ("kind", _TEXT), ("group", _TEXT), ("against", _TEXT), ("rank", _TEXT), ("decisions", _LONG),
        ("compared", _LONG), ("undecided", _TRUE),
    ]),
    "divergences": pa.schema([
        ("kind", _TEXT), ("group", _TEXT), ("position", _LONG), ("side", _LONG), ("rank", _TEXT), ("decision", _TEXT),
        ("op", _LONG), ("host_ns", _LONG),
    ]),
    "clocks": pa.schema([
        ("rank", _TEXT), ("against", _TEXT), ("clock", _TEXT), ("low_ns", _LONG), ("high_ns", _LONG),
        ("collectives", _LONG),
    ]),
}  # fmt: skip
"""Columns of each table."""
Row = Mapping[str, Any]


def check_dataset(folder: Path, inputs: Sequence[Path]) -> None:
    """Ask, before the work, whether ``folder`` may be written.

    Raises:
        ConfigError: It is, holds or is part of an input; it cannot be written; or something else is there.
    """
    try:
        real, parent = folder.resolve(), folder.absolute().parent
        for given in inputs:
            source = given.resolve()
            if real == source or real in source.parents or source in real.parents:
                raise ConfigError(f"--out {folder}: is, holds or is part of the input {given}; expected another place")
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {folder}: cannot be written; expected a place in a directory that exists")
        if os.path.lexists(folder) and not (folder / MARK).is_file():
            raise ConfigError(f"--out {folder}: exists and holds no results of fleet; only such a folder is replaced")
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}") from None


def write_dataset(judged: Judged, folder: Path) -> None:
    """Make ``folder`` and all tables in it.

    Raises:
        OSError: The disk is full or gone.
    """
    folder.mkdir()
    (folder / MARK).touch()
    for name in SCHEMAS:
        (folder / name).mkdir()
    for number, rank in enumerate(judged.fleet.ranks):
        for name, rows in _tables(judged, rank).items():
            _write(folder / name / f"{number:05d}.parquet", name, rows)
    for name, rows in _between(judged.fleet).items():
        _write(folder / name / "all.parquet", name, rows)


def _write(path: Path, name: str, rows: Iterable[Row]) -> None:
    kept = [{key: _kept(value) for key, value in row.items()} for row in rows]
    table = pa.Table.from_pylist(kept, schema=SCHEMAS[name])
    parquet.write_table(table, path, compression="zstd", row_group_size=max(1, table.num_rows))


def _kept(value: Any) -> Any:
    """``value`` as far as a column can hold it: a damaged recording, or the name of a folder, may go beyond."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int):
        return value if abs(value) <= MAX_LONG else None
    if isinstance(value, list):
        return [_kept(each) for each in value]
    return {_kept(key): _kept(each) for key, each in value.items()} if isinstance(value, dict) else value


def _tables(judged: Judged, rank: RankSummary) -> dict[str, list[Row]]:
    place = rank.place
    who = {"rank": place.name, "node": place.node, "dp": place.ranks.dp, "pp": place.ranks.pp, "tp": place.ranks.tp}
    row = {
        **who,
        **_by_verdict(rank.verdicts),
        "role": place.role,
        "place": place.place,
        "outcome": rank.outcome(judged.accepted),
        "error": rank.error or None,
        "pairs_checked": rank.lookups,
        "notes": list(rank.notes),
        **{
            key: getattr(rank, key)
            for key in ("records", "transfers", "begin_ns", "end_ns", "wall_ahead_ns", "engine", "version")
        },
    }
    return {
        "ranks": [row],
        "findings": [
            {
                **who,
                **_by_verdict(defect.verdicts),
                "fingerprint": defect.example.fingerprint,
                "hazard": defect.example.hazard.value,
                "cause": defect.example.cause.value,
                "verdict": defect.example.verdict.value,
                "accepted": judged.accepted.of(defect.example) is not None,
                "earlier_op": int(defect.example.earlier.op),
                "later_op": int(defect.example.later.op),
                "earlier_site": defect.example.earlier.site,
                "later_site": defect.example.later.site,
                "text": defect.text or None,
            }
            for defect in rank.defects
        ],
        "fences": [
            {
                **who,
                "op": kind.value,
                "needed_ns": {hazard.value: ns for hazard, ns in rank.fences[kind].needed_ns.items()},
                **{
                    key: getattr(rank.fences[kind], key)
                    for key in ("count", "in_flight", "waited_ns", "avoidable_ns", "p50_ns", "p99_ns", "max_ns")
                },
            }
            for kind in TransferKind
            if kind in rank.fences
        ],
        "coverage": [
            *({**who, "what": "checked", "name": hazard.value, "count": n} for hazard, n in rank.checked.items()),
            *({**who, "what": "lost", "name": reason.name.lower(), "count": n} for reason, n in rank.lost.items()),
        ],
    }


def _by_verdict(verdicts: Mapping[Verdict, int]) -> dict[str, int]:
    return {verdict.value: verdicts.get(verdict, 0) for verdict in _VERDICTS}


def _between(fleet: Fleet) -> dict[str, list[Row]]:
    names = [rank.place.name for rank in fleet.ranks]
    comparisons: list[Row] = []
    divergences: list[Row] = []
    for result in fleet.groups:
        group, members = result.group, result.group.members
        head = {"kind": group.kind, "group": group.name}
        for member, compared in zip(members[1:], result.compared, strict=True):
            comparisons.append(
                {
                    **head,
                    "against": names[members[0].number],
                    "rank": names[member.number],
                    "decisions": result.decisions,
                    "compared": compared,
                    "undecided": member.number in result.undecided,
                }
            )
        for side, part in enumerate(result.divergence.sides if result.divergence is not None else ()):
            decision = part.decision
            found = {} if decision is None else {"decision": decision.text, "op": int(decision.op)}
            host_ns = {} if decision is None else {"host_ns": decision.host_ns}
            position = result.divergence.position if result.divergence is not None else 0
            divergences += [
                {**head, "position": position, "side": side, "rank": names[number], **found, **host_ns}
                for number in part.numbers
            ]
    clocks: list[Row] = [
        {
            "rank": names[clock.number],
            "against": names[clock.against],
            "clock": "wall" if clock.wall else "host",
            "low_ns": None if clock.bounds is None else clock.bounds.low_ns,
            "high_ns": None if clock.bounds is None else clock.bounds.high_ns,
            "collectives": 0 if clock.bounds is None else clock.bounds.count,
        }
        for clock in fleet.clocks
    ]
    return {"comparisons": comparisons, "divergences": divergences, "clocks": clocks}
