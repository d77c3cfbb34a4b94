"""The pytest plugin, run as its users run it: a race fails the test, the same with one wait does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_obs.cli import main
from hicache_obs.testing import gated, regression, stream_watch  # noqa: F401 numpy must not be loaded by inner runs

pytest_plugins = ["pytester"]

PROGRAM = '''
import numpy as np
import pytest
from hicache_obs.records import Direction, Mode, Work, device, host, page_ids

PAGES = page_ids([5, 6])

def serve(dev, *, fence):
    """A round still writes the pages that a load-back restores."""
    forward, load = dev.Stream("forward"), dev.Stream("load")
    with dev.stream(forward):
        dev.launch(lambda: None, Work("forward", (device(Mode.WRITE, PAGES),), group=1))
    if fence:
        load.wait_stream(forward)
    with dev.stream(load):
        accesses = host(Mode.READ, PAGES), device(Mode.WRITE, PAGES)
        dev.launch(lambda: None, Work("load-back", accesses, group=2, direction=Direction.HOST_TO_DEVICE))

'''
RACY = PROGRAM + "def test_serve(kv_streams):\n    serve(kv_streams.device, fence=False)\n"
FENCED = PROGRAM + "def test_serve(kv_streams):\n    serve(kv_streams.device, fence=True)\n"
devices = pytest.mark.parametrize("device", ["virtual", "threads"])


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs pytest in this process on the text of a test file, with the plugin and no other one."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def call(text: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_engine=text)
        return pytester.runpytest_inprocess("-p", "hicache_obs.testing.pytest_plugin", *arguments)

    return call


@devices
def test_a_race_fails_the_test(run, device: str) -> None:
    """As a failure, not an error beside it, with what ran where, the missing edge and the command that replays it."""
    result = run(RACY, "--hicache-obs-device", device)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"1 stream race on device '{device}' (2 operations with accesses recorded, 2 page pairs checked)",
            "HC-* waw_forward_restore",
            "*device pages 5-6",
            "*earlier  forward round 1 writes them on stream 'forward', op * (forward)*",
            "*later    restore transfer 2 writes them on stream 'load', op * (load-back)*",
            "*proof    nothing makes 'load' wait for 'forward' up to op * before op *",
            "*fix      before op * is issued: load.wait_stream(forward), or wait for an event recorded after op *",
            "*replay   hicache-obs replay * --between s1 s2",
        ]
    )


@devices
def test_one_wait_makes_it_pass(run, device: str) -> None:
    """The same program with the edge."""
    run(FENCED, "--hicache-obs-device", device).assert_outcomes(passed=1)


def test_the_replay_command_works(run, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed line, run as it is, shows both schedules and confirms them."""
    lines = {line for line in run(RACY).outlines if line.startswith("  replay ")}
    assert len(lines) == 1, "the same line, where pytest prints the failure whole in its summary too (CI)"
    capsys.readouterr()

    assert main(lines.pop().split()[2:]) == 0

    assert "both were in flight together" in capsys.readouterr().out


def test_a_test_that_fails_by_itself_keeps_its_failure(run) -> None:
    """The race is told beside it."""
    result = run(RACY + "    assert 1 == 2\n")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert 1 == 2", "*hicache-obs call*", "1 stream race on *"])


def test_work_that_raises_fails_the_test(run) -> None:
    """Also when the test itself never waits for it."""
    text = PROGRAM + (
        "def broken():\n    raise ValueError('out of pages')\n\n"
        "def test_it(kv_streams):\n    kv_streams.device.launch(broken, Work('broken'))\n"
    )
    result = run(text, "--hicache-obs-device", "threads")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*out of pages*"])


@pytest.mark.parametrize(
    ("arguments", "body", "outcome", "text"),
    [
        ([], "pass", "failed", "*nothing was checked (0 operations with accesses recorded, 0 page pairs checked)*"),
        (["--hicache-obs-unchecked=warn", "-Walways"], "pass", "passed", "*UncheckedWarning: nothing was checked*"),
        (["--hicache-obs-unchecked=pass"], "pass", "passed", "*1 passed*"),
        ([], "kv_streams.allow_unchecked = True", "passed", "*1 passed*"),
    ],
)
def test_nothing_checked_is_not_a_pass(run, arguments: list[str], body: str, outcome: str, text: str) -> None:
    """Unless the test, or the whole run, says that this is meant."""
    result = run(f"def test_it(kv_streams):\n    {body}\n", *arguments)

    assert list(result.parseoutcomes())[-1 if outcome == "failed" else 0] == outcome
    result.stdout.fnmatch_lines([text])


@pytest.mark.parametrize(
    ("marker", "fence", "failure"),
    [
        ('"waw_forward_restore"', False, None),
        ('"waw_forward_restore"', True, "*expected waw_forward_restore, and found no race (*2 page pairs checked)*"),
        ('"host_reuse"', False, "*expected host_reuse, and found waw_forward_restore (*"),
        ('"waw_forward_restore", "host_reuse"', False, "*expected host_reuse, and found waw_forward_restore (*"),
        ('"waw"', False, "*marker hicache_race: 'waw'; must be one of waw_forward_restore, war_forward_restore,*"),
        ("", False, "*marker hicache_race: no hazard; must be one of waw_forward_restore, *"),
    ],
)
def test_expected_hazards(run, marker: str, fence: bool, failure: str | None) -> None:
    """Exactly what the marker names must be found."""
    result = run(PROGRAM + f"@pytest.mark.hicache_race({marker})\n" + RACY_OR_NOT.format(fence=fence))

    result.assert_outcomes(passed=failure is None, failed=failure is not None)
    if failure is not None:
        result.stdout.fnmatch_lines([failure])


RACY_OR_NOT = "def test_serve(kv_streams):\n    serve(kv_streams.device, fence={fence})\n"


def test_an_unexpected_hazard_beside_the_expected_one(run) -> None:
    """Only the surprise is explained."""
    text = PROGRAM + (
        '@pytest.mark.hicache_race("waw_forward_restore")\n'
        "def test_it(kv_streams):\n"
        "    serve(kv_streams.device, fence=False)\n"
        "    dev, back = kv_streams.device, kv_streams.device.Stream('back')\n"
        "    with dev.stream(back):\n"
        "        dev.launch(lambda: None, Work('copy', (host(Mode.WRITE, PAGES),)))\n"
    )
    result = run(text)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["1 stream race on *", "HC-* host_reuse"])
    result.stdout.no_fnmatch_line("HC-* waw_forward_restore")


def test_the_marker_needs_the_fixture(run) -> None:
    """A marker without the fixture would check nothing."""
    result = run("import pytest\n@pytest.mark.hicache_race('other')\ndef test_it():\n    pass\n")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*hicache_race needs the fixture kv_streams*"])


def test_device_schedule_and_seed(run, pytester: pytest.Pytester) -> None:
    """From the configuration file, over it from the command line, over both from the marker."""
    pytester.makeini("[pytest]\nhicache_obs_device = threads\n")
    text = (
        "import pytest\n"
        "def test_run(kv_streams):\n    print('device', kv_streams.device.name)\n"
        "@pytest.mark.hicache_streams(device='virtual', schedule='eager', seed=3, allow_unchecked=True)\n"
        "def test_marked(kv_streams):\n    print('marked', kv_streams.device.name, kv_streams.device.bare.schedule)\n"
    )
    arguments = ["-s", "--hicache-obs-unchecked=pass", "--strict-markers"]

    run(text, *arguments).stdout.fnmatch_lines(["*device threads*", "*marked virtual eager*"])
    run(text, *arguments, "--hicache-obs-device=virtual").stdout.fnmatch_lines(["*device virtual*"])


@pytest.mark.parametrize(
    ("arguments", "marker", "text"),
    [
        (["--hicache-obs-device=tpu"], "", "*kv_streams: device 'tpu': must be one of auto, cuda, threads, virtual*"),
        (["--hicache-obs-schedule=soon"], "", "*schedule 'soon': must be one of *adversarial*"),
        (["--hicache-obs-seed=x"], "", "*hicache_obs_seed 'x': must be an integer*"),
        (["--hicache-obs-unchecked=no"], "", "*hicache_obs_unchecked 'no': must be one of fail, warn, pass*"),
        ([], "@pytest.mark.hicache_streams(kind='virtual')\n", "*hicache_streams: kind; takes device, schedule, *"),
    ],
)
def test_settings_that_are_not_allowed(run, arguments: list[str], marker: str, text: str) -> None:
    """Are named, with what is."""
    result = run(f"import pytest\n{marker}def test_it(kv_streams):\n    pass\n", *arguments)

    assert result.ret != 0
    assert "INTERNALERROR" not in result.stdout.str()
    output = [*result.outlines, *result.errlines]
    assert "another exception" not in "".join(output)
    pytest.LineMatcher(output).fnmatch_lines([text])


def edited(path: Path) -> str:
    """The written test with one wait put between its two steps."""
    text = path.read_text()
    step = '  {"id": "fence", "op": "wait_stream", "waiter": "load", "on": "forward"},\n'
    return text.replace('  {"id": "s2"', f'{step}  {{"id": "s2"')


@devices
def test_written_tests(run, pytester: pytest.Pytester, device: str) -> None:
    """A written test needs no plugin, fails for both reasons as it is, and passes with the edge."""
    arguments = ["--hicache-obs-device", device, "--hicache-obs-write", "kept"]
    run(RACY, *arguments).stdout.fnmatch_lines(["*written *test_hc_*_serve.py"])
    (written,) = (pytester.path / "kept").iterdir()

    racy = pytester.runpytest_inprocess(written)
    written.write_text(edited(written))
    fenced = pytester.runpytest_inprocess(written)
    run(RACY, *arguments)

    racy.assert_outcomes(failed=2)
    racy.stdout.fnmatch_lines(
        ["*overlap: s1 and s2 in flight together*", "*s2 was complete while step s1 was held at a gate*"]
    )
    fenced.assert_outcomes(passed=2)
    assert "fence" in written.read_text(), "a file that is there already was overwritten"


def test_written_tests_stand_alone(run, pytester: pytest.Pytester) -> None:
    """In a process of their own, from another directory, with hicache-obs alone."""
    run(RACY, "--hicache-obs-write", "kept")
    (written,) = (pytester.path / "kept").iterdir()
    elsewhere = pytester.mkdir("elsewhere")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(written)]

    ended = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=60, check=False)

    assert "2 failed" in ended.stdout, ended.stdout
    assert "nothing makes 'load' wait for 'forward'" in ended.stdout


def test_two_workers_write_into_one_directory(run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test of an xdist run fails with its own race, and every file is whole."""
    tests = "".join(f"def test_{n}(kv_streams):\n    serve(kv_streams.device, fence={n} > 3)\n" for n in range(8))

    result = run(PROGRAM + tests, "-p", "xdist", "-n", "2", "--hicache-obs-write", "kept")

    result.assert_outcomes(failed=4, passed=4)
    kept = sorted((pytester.path / "kept").iterdir())
    assert [path.name[len("test_hc_12345678_") :] for path in kept] == [f"{number}.py" for number in range(4)]
    for path in kept:
        scenario = path.read_text().partition('r"""')[2].partition('"""')[0]
        assert [step["op"] for step in json.loads(scenario)["steps"]] == ["kernel", "memcpy"]


def test_the_plugin_costs_nothing_until_it_is_used() -> None:
    """pytest loads it in every run of every project on the machine."""
    text = (
        "import sys, pytest\n"
        "before = set(sys.modules)\n"
        "import hicache_obs.testing.pytest_plugin\n"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))\n"
        "print(sorted(name for name in set(sys.modules) - before if name.startswith('hicache_obs')))\n"
    )
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)

    loaded, ours = ended.stdout.splitlines()
    assert not {"numpy", "torch", "click", "msgspec", "pyarrow"} & set(eval(loaded))
    assert eval(ours) == ["hicache_obs", "hicache_obs.testing", "hicache_obs.testing.pytest_plugin"]


def test_a_run_without_the_fixture_is_left_alone(run) -> None:
    """Passing, failing and raising tests end as they would without the plugin."""
    text = "def test_a():\n    pass\ndef test_b():\n    assert 0\ndef test_c():\n    raise ValueError\n"

    result = run(text)

    result.assert_outcomes(passed=1, failed=2)
    result.stdout.no_fnmatch_line("*hicache-obs call*")


def test_the_example_in_the_docs(run, checkout: Path) -> None:
    """Runs as printed, and says what is printed."""
    _, _, rest = (checkout / "docs" / "testing.md").read_text().partition("```python\n")
    code, _, rest = rest.partition("```\n")
    printed = rest.partition("```\n")[2].partition("```")[0].splitlines()

    result = run(code)

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([line for line in printed if line and not line.startswith(("...", "  replay"))])


def test_the_plugin_is_declared(checkout: Path) -> None:
    """Under the name that ``-p no:hicache_obs`` switches off."""
    assert 'hicache_obs = "hicache_obs.testing.pytest_plugin"' in (checkout / "pyproject.toml").read_text()


def test_pages_used_after_they_were_freed(run) -> None:
    """A misuse of pages fails the test too; there is no schedule to replay, for every one has it."""
    text = PROGRAM + (
        "def test_it(kv_streams):\n"
        "    dev, stream = kv_streams.device, kv_streams.device.Stream('forward')\n"
        "    kv_streams.recorder.page_alloc(1, device(Mode.WRITE, PAGES))\n"
        "    kv_streams.recorder.page_free(1, device(Mode.WRITE, PAGES))\n"
        "    with dev.stream(stream):\n"
        "        dev.launch(lambda: None, Work('forward', (device(Mode.WRITE, PAGES),), group=1))\n"
    )
    result = run(text)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["1 finding on device 'virtual' *", "HC-* lifetime*"])
    result.stdout.no_fnmatch_line("*replay*")
