"""The real cache controller, explored: nothing races, every hazard is checked, and each protection is needed."""

from __future__ import annotations

import json
import shlex

import pytest

from hicache_obs.cli import explore as explore_command
from hicache_obs.cli import main
from hicache_obs.findings import ExitCode, Hazard
from hicache_obs.testing import execute, explore
from hicache_obs.testing.controller_program import ABSENT, ControllerProgram
from hicache_obs.testing.protections import PROTECTIONS

SMALL = (("ab", 1), ("cdaefg", 1), ("abh", 2), ("abhi", 2))
"""A workload whose whole space is 32 runs; as ``controller_program.WORKLOAD``."""
FENCES = pytest.mark.parametrize("fence", ["stream", "page"])


@FENCES
def test_with_every_protection_nothing_races_in_the_whole_space(fence):
    program = ControllerProgram(fence, workload=SMALL, pages=4)
    found = explore(program)
    found.require_clean()
    assert (found.runs, found.queries, found.exit_code) == (32, 31, ExitCode.CLEAN)
    assert (found.bounded_queries, found.bounded_turns, found.unknown) == (0, 0, 0)
    assert found.histories == 32
    assert found.workloads > 1, "no answer of a query has changed what the scheduler does"
    ranges = program.ranges()
    assert ranges["rounds"][0] >= 3
    assert ranges["retractions"][0] >= 1
    assert ranges["load-backs"][0] >= 2


def test_every_hazard_is_checked_or_absent_for_a_reason():
    found = explore(ControllerProgram(workload=SMALL, pages=4), max_runs=1)
    assert {hazard for hazard, count in found.checks.items() if count} == set(Hazard) - set(ABSENT)


def test_the_built_in_workload_is_large_enough():
    program = ControllerProgram()
    found = explore(program, max_runs=3)
    assert {hazard for hazard, count in found.checks.items() if count} == set(Hazard) - set(ABSENT)
    assert found.open > 3
    assert found.failures == {}
    assert (program.ranges()["retractions"][0] >= 1, program.ranges()["load-backs"][0] >= 2) == (True, True)


CASES = [(name, fence) for name, protection in PROTECTIONS.items() for fence in protection.fences]


@pytest.mark.parametrize(("name", "fence"), CASES)
def test_without(name, fence):
    """The race the protection is there against is found, and its run can be made again."""
    program = ControllerProgram(fence, [name])
    found = explore(program, max_runs=5)
    hazards = {race.example.hazard for race in found.races.values()}
    assert hazards >= PROTECTIONS[name].against
    # A copy that starts before its index tensor is filled also races with what the block was used for before.
    others = {Hazard.OTHER, Hazard.LIFETIME} if name == "start-waits" else {Hazard.OTHER}
    assert hazards - PROTECTIONS[name].against <= others
    for fingerprint, race in found.races.items():
        again = execute(program, race.choices)
        assert (race.example.earlier.op, race.example.later.op, fingerprint) in {
            (finding.earlier.op, finding.later.op, finding.fingerprint) for finding in again.findings
        }


def test_without_pins_only_a_late_write_back_races():
    """The run in which every query is true is clean: a device that is fast enough hides it."""
    program = ControllerProgram("page", ["write-pins"])
    assert execute(program, "").findings == ()
    found = explore(program, max_runs=5)
    assert all("0" in race.choices for race in found.races.values())
    assert found.races != {}


# -- the command ------------------------------------------------------------------------------------------------------


def run(capsys, *arguments: str, code: int):
    """JSON of one command."""
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["load-fence", "write-pins", "acks"])
def test_the_printed_command_makes_the_run_again(capsys, name):
    shown = run(capsys, "explore", "--off", name, "--stop", code=1)
    assert shown["outcome"] == "findings"
    for race in shown["races"]:
        program, *arguments = shlex.split(race["replay"])
        assert program == "hicache-obs"
        again = run(capsys, *arguments, code=1)
        assert again["runs"] == 1
        assert race["fingerprint"] in [other["fingerprint"] for other in again["races"]]
    assert main(["explore", "--off", name, "--stop"]) == 1
    assert f"replay   {shown['races'][0]['replay']}\n" in capsys.readouterr().out


def test_the_kept_trace_is_checked_and_replayed(capsys, tmp_path):
    journal = str(tmp_path / "journal")
    shown = run(capsys, "explore", "--off", "write-pins", "--stop", "--journal", journal, code=1)
    checked = run(capsys, "check", journal, code=1)
    assert {race["fingerprint"] for race in checked["races"]} == {race["fingerprint"] for race in shown["races"]}
    assert main(["replay", journal]) == 0
    assert "the later one was complete first" in capsys.readouterr().out


def test_a_budget_is_reported(capsys):
    shown = run(capsys, "explore", "--max-runs", "2", code=3)
    assert (shown["outcome"], shown["exhausted"], shown["runs"]) == ("not-decided", False, 2)
    assert main(["explore", "--max-runs", "2"]) == 3
    out = capsys.readouterr().out
    assert "2, NOT all:" in out
    assert "No findings so far, and not decidable: raise --max-runs." in out


def test_a_run_is_shown_choice_by_choice(capsys):
    assert main(["explore", "--off", "write-pins", "--choices", "11110"]) == 1
    out = capsys.readouterr().out
    assert "    5  0  query of item 64 (record) of stream 'write-back'\n" in out
    assert "HC-" in out
    assert main(["explore", "--choices", "11110"]) == 0
    assert "No findings in this run." in capsys.readouterr().out


def test_an_own_program(capsys, tmp_path, monkeypatch):
    text = "from json import dumps\ndef program(world):\n    world.device.Stream('a').record_event().query()\n"
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    for argument in ("mine.py:program", "mine:program"):
        shown = run(capsys, "explore", argument, code=3)
        assert (shown["runs"], shown["program"], shown["outcome"]) == (2, argument, "not-decided")
    assert main(["explore", "mine.py:prog"]) == 2
    assert capsys.readouterr().err.endswith("mine.py has no function prog; it has program\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--off", "fences"], "'fences' is not one of 'load-fence'"),
        (["--fence", "none", "--off", "reader-stamps"], "--off reader-stamps: is no part of --fence none"),
        (["--choices", "x"], "choice 1 (query of item 10 (record) of stream 'write-back') must be one of 1, 0"),
        (["--choices", "1" * 20], "must be 8 at most"),
        (["--max-runs", "0"], "--max-runs"),
        (["--preemptions", "-1"], "--preemptions"),
        (["program"], "PROGRAM program: expected FILE.py:NAME or MODULE:NAME"),
        (["no.py:program"], "PROGRAM no.py:program: there is no file no.py"),
        (["./json:dumps"], "PROGRAM ./json:dumps: expected FILE.py:NAME or MODULE:NAME"),
        (["no_such_module:program"], "cannot be imported: ModuleNotFoundError"),
        (["json:program"], "json has no function program; it has dump, dumps, "),
        (["json:dumps", "--off", "acks"], "--off: belongs to the built-in program"),
        (["json:dumps", "--fence", "page"], "--fence: belongs to the built-in program"),
        (["--journal", "/proc/journal", "--max-runs", "1"], "--journal /proc/journal"),
    ],
)
def test_what_cannot_be_explored(capsys, arguments, message):
    assert main(["explore", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_the_help_names_every_protection():
    assert tuple(PROTECTIONS) == explore_command.PROTECTIONS


def test_the_defaults_are_those_of_the_library():
    from hicache_obs.testing import Bounds
    from hicache_obs.testing.exploration import MAX_RUNS

    assert (MAX_RUNS, Bounds().preemptions) == (explore_command.MAX_RUNS, explore_command.PREEMPTIONS)


def test_the_help_fits_80_columns(capsys):
    assert main(["explore", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--off NAME" in out
    assert max(len(line) for line in out.splitlines()) <= 80
