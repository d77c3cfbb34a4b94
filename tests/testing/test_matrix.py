"""The switch matrix: its cells hold, the documented table is what it prints, and it notices what does not hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hicache_obs.cli import main
from hicache_obs.errors import StreamError
from hicache_obs.findings import Hazard
from hicache_obs.streams.schedule import schedule_named
from hicache_obs.testing import matrix
from hicache_obs.testing.matrix import Overtakes, cells, judge_cell, places_of, run, table, wrong
from hicache_obs.testing.protections import PROTECTIONS

QUICK = [("load-fence", "page"), ("record-stream", "stream"), ("graph-load-wait", "page"), ("move-gate", "stream")]


def documented(checkout: Path) -> dict[tuple[str, str], str]:
    """Rows of the documented table, by protection and fence."""
    lines = [line for line in (checkout / "docs/hazard-matrix.md").read_text().splitlines() if line.startswith("| ")]
    return {tuple(line.strip("| ").split(" | ")[:2]): line for line in lines[1:]}


@pytest.mark.parametrize(("name", "fence"), QUICK)
def test_a_cell_is_as_documented(checkout, name, fence):
    cell = judge_cell(name, fence)
    assert cell.holds
    assert table([cell]).splitlines()[-1] == documented(checkout)[name, fence]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fence"), [cell for cell in cells() if cell not in QUICK])
def test_every_cell_is_as_documented(checkout, name, fence):
    cell = judge_cell(name, fence)
    assert cell.holds
    assert table([cell]).splitlines()[-1] == documented(checkout)[name, fence]


def test_the_document_has_every_cell_and_no_other(checkout):
    assert list(documented(checkout)) == cells()


def test_every_hazard_that_can_be_here_has_a_cell():
    """The three others need another process, another rank, or a name of their own."""
    against = frozenset().union(*(protection.against for protection in PROTECTIONS.values()))
    assert set(Hazard) - against == {Hazard.RDMA, Hazard.TP_DIVERGENCE, Hazard.OTHER}


def test_the_quiet_run_has_the_findings_and_right_contents():
    found = run(PROTECTIONS["load-fence"], "page", schedule_named("eager"), off=True)
    struck = run(PROTECTIONS["load-fence"], "page", schedule_named("adversarial"), off=True)
    assert found.hazards == {Hazard.WAW_FORWARD_RESTORE, Hazard.WAR_FORWARD_RESTORE}
    assert not wrong(found, found)
    assert wrong(struck, found)
    assert [(f.earlier.op, f.later.op) for f in found.findings] == [(f.earlier.op, f.later.op) for f in struck.findings]


def test_a_witness_of_another_trace_is_refused():
    protection = PROTECTIONS["load-fence"]
    found = run(protection, "page", schedule_named("eager"), off=True)
    place = places_of(found.records)[found.findings[0].later.op]
    with pytest.raises(StreamError, match="not the witness's operation 'elsewhere'"):
        run(protection, "page", Overtakes(place, "elsewhere"), off=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"clean": False}, "**some**"),
        ({"checks": 0}, "| 0 | 0 |"),
        ({"reported": 11}, "11 of 12 schedules"),
        ({"witnessed": 0}, "**no witness**"),
    ],
)
def test_a_cell_that_does_not_hold_is_told(capsys, monkeypatch, change, said):
    held = matrix.Cell("load-fence", "page", (Hazard.GRAPH,), 4, True, 12, 12, 2, 1)
    cell = dataclasses.replace(held, **change)
    assert held.holds
    assert not cell.holds
    monkeypatch.setattr(matrix, "cells", lambda: [("load-fence", "page")])
    monkeypatch.setattr(matrix, "judge_cell", lambda name, fence: cell)
    assert main(["explore", "--matrix"]) == 1
    out = capsys.readouterr().out
    assert said in out
    assert "0 of 1 cells hold.\n  does not hold: load-fence, fence page\n" in out
    monkeypatch.setattr(matrix, "judge_cell", lambda name, fence: held)
    assert main(["explore", "--matrix", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["holds"] is True


@pytest.mark.parametrize("other", [["--fence", "page"], ["--off", "acks"], ["--choices", "1"], ["json:dumps"]])
def test_the_matrix_is_the_whole_matrix(capsys, other):
    assert main(["explore", "--matrix", *other]) == 2
    assert "--matrix: runs the built-in program in every way; expected no" in capsys.readouterr().err
