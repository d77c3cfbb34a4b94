"""``record``: how the command and the profiler are run, and what is said where something is missing. See also the
end-to-end test with the real Nsight Systems."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_obs.cli import main
from hicache_obs.readers import open_trace
from hicache_obs.readers.open_profile import open_profile
from hicache_obs.records import Memcpy

DEADLINE_S = 60
TORCH = "import torch; a = torch.ones(8, 8); print(float((a @ a).sum()))"
RACY = """
from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.testing import History
import os
writer = JournalWriter(os.environ["HICACHE_OBS_JOURNAL"])
writer.write(list(History("{}").records))
writer.close()
"""
"""Stands for an engine with a recorder of its own: it leaves a journal where it is told to."""
RING = """
from hicache_obs.recorder.ring_directory import create_ring
from hicache_obs.testing import History
ring = create_ring("engine")
for record in History("F:w1 e=F L<e L:w1").records:
    ring.append(record)
ring.close()
"""


@pytest.fixture
def fake_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``fake_nsys(known)``: an ``nsys`` on PATH that knows these flags, notes its arguments and runs the command."""

    def make(known: str = "--cuda-graph-trace= --cuda-event-trace=") -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        note = tmp_path / "arguments"
        program = folder / "nsys"
        program.write_text(
            f"""#!/bin/sh
if [ "$2" = --help ]; then echo "{known}"; exit; fi
printf '%s\\n' "$@" > {note}
while [ "$1" != "--output" ]; do shift; done
shift 2
exec "$@"
"""
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return note

    return make


def python(code: str) -> list[str]:
    """A command that runs ``code``."""
    return ["--", sys.executable, "-c", code]


def test_nsys_gets_the_flags_that_its_version_knows(
    tmp_path: Path, fake_nsys: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    note = fake_nsys("--cuda-graph-trace=")
    out = tmp_path / "out"

    assert main(["record", "-o", str(out), *python("print('hello')")]) == 3
    arguments = note.read_text().splitlines()
    assert arguments[:5] == [
        "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node",
    ]  # fmt: skip
    assert arguments[5:7] == ["--output", str(out / "recording")]
    assert arguments[7:] == python("print('hello')")[1:]
    text = capfd.readouterr().out
    assert text.startswith("hello\n")
    assert f"{out}: nothing of Nsight Systems: it wrote no report; its messages are above\n" in text
    assert text.endswith("NOTHING CHECKED: nothing was recorded\n")


def test_a_newer_nsys_is_told_not_to_serialise_streams(tmp_path: Path, fake_nsys: Callable[..., Path]) -> None:
    note = fake_nsys()

    main(["record", "-o", str(tmp_path / "out"), *python("")])
    assert "--cuda-event-trace=false" in note.read_text().splitlines()


@pytest.mark.parametrize(("history", "code"), [("F:w5 L:w5", 1), ("F:w5 L<F L:w5", 0)])
def test_the_journal_of_the_command_is_judged(
    tmp_path: Path, fake_nsys: Callable[..., Path], capfd: pytest.CaptureFixture[str], history: str, code: int
) -> None:
    fake_nsys()
    out = tmp_path / "out"

    assert main(["record", "-o", str(out), *python(RACY.format(history))]) == code
    text = capfd.readouterr().out
    assert f"{out}/journal: {'findings' if code else 'clean'}, " in text
    assert text.endswith(f"hicache-obs convert {out}/journal -o {out}/timeline.pftrace\n")


def test_rings_are_read_while_the_command_runs(tmp_path: Path, fake_nsys: Callable[..., Path]) -> None:
    fake_nsys()
    out = tmp_path / "out"

    assert main(["record", "-o", str(out), *python(RING)]) == 0
    (folder,) = (out / "journal").iterdir()
    assert folder.name.startswith("engine-dp0-pp0-tp0.")
    assert len([record for record in open_trace(folder) if isinstance(record, Memcpy)]) == 1


def test_the_command_fails(tmp_path: Path, fake_nsys: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    fake_nsys()
    safe = RACY.format("F:w5 L<F L:w5")
    for number, (end, words) in enumerate(
        [
            ("raise SystemExit(7)", "ended with exit code 7"),
            ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
            ("raise SystemExit(143)", "ended with exit code 143 (SIGTERM)"),
        ]
    ):
        command = python(f"{safe}\n{end}")
        assert main(["record", "-o", str(tmp_path / str(number)), *command]) == 3  # what it did was clean
        text = capfd.readouterr().out
        assert f"{shlex.join(command[1:])} under nsys {words}: what it would have done then is not recorded\n" in text
        assert "clean, " in text
    racy = python(f"{RACY.format('F:w5 L:w5')}\nraise SystemExit(7)")
    assert main(["record", "-o", str(tmp_path / "racy"), *racy]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "out", "--", "no-such-program"], "record -- no-such-program: no such program; expected one on PATH"),
        (["-o", "full", "--", "true"], "-o {full}: is not empty; a recording has a folder of its own"),
        (["-o", "full/file", "--", "true"], "-o {full/file}: File exists; expected a folder that can be made"),
        (["-o", "out"], "Missing argument"),
        (["-o", "out", "--with", "gdb", "--", "true"], "Invalid value for '--with'"),
        (["-o", "out", "--with", "nsys", "--", "true"], "--with nsys: no nsys on PATH; install Nsight Systems, or"),
    ],
)
def test_what_cannot_be_recorded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "true").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    words = [
        str(tmp_path / word) if place and arguments[place - 1] == "-o" else word for place, word in enumerate(arguments)
    ]

    assert main(["record", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for name in ("full/file", "full"):
        message = message.replace(f"{{{name}}}", str(tmp_path / name))
    assert message in line
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bin", "full"]


# -- torch.profiler ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_torch_program_is_profiled_without_its_help(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    program = "import torch\nwith torch.profiler.record_function('mine'):\n    torch.ones(8, 8) @ torch.ones(8, 8)"

    assert main(["record", "--with", "torch", "-o", str(out), *python(program)]) == 3
    (trace,) = (out / "torch").iterdir()
    assert re.fullmatch(r"\d+\.json\.gz", trace.name)
    profile = open_profile(trace)
    assert profile is not None
    assert "mine" in [profile.names[text] for text in profile.ranges.text.tolist()]
    text = capfd.readouterr().out
    assert f"{trace}: NOTHING CHECKED: no copy between host and device" in text
    assert "!! operations: 0 device operations on 0 streams -> record with CUDA tracing on" in text
    assert f"{out}: no journal: none of the command's processes has a recorder; pages are unknown\n" in text


@pytest.mark.slow
def test_every_process_has_a_trace_and_its_own_sitecustomize_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has one already, starts a process of its own, and forks one that must write nothing."""
    out, site = tmp_path / "out", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"open({str(tmp_path / 'customized')!r}, 'a').write('x')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    child = f"subprocess.run([sys.executable, '-c', {TORCH!r}], check=True)"
    fork = "os.fork() or sys.exit()"
    program = f"import os, subprocess, sys; {TORCH}; {child}; {fork}; os.wait()"

    main(["record", "--with", "torch", "-o", str(out), *python(program)])
    assert len(list((out / "torch").glob("*.json.gz"))) == 2
    assert list((out / "torch").glob("*.error")) == []
    assert (tmp_path / "customized").read_text() == "xx"


@pytest.mark.slow
def test_a_journal_that_does_not_fit_a_profile_is_judged_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch.profiler has no ranges of the recorder; the journal knows pages and order all the same."""
    out = tmp_path / "out"

    assert main(["record", "--with", "torch", "-o", str(out), *python(f"{RACY.format('F:w5 L:w5')}\n{TORCH}")]) == 1
    text = capfd.readouterr().out
    assert "json.gz and journal are judged apart: " in text
    assert f"{out}/journal: findings, 1 page pairs checked" in text
    assert text.endswith(f"hicache-obs convert {out}/journal -o {out}/timeline.pftrace\n")


def test_a_program_without_torch_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"

    assert main(["record", "--with", "torch", "-o", str(out), *python("print(1)")]) == 3
    assert f"{out}: nothing of torch.profiler: no process of the command imported torch" in capfd.readouterr().out


# -- signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_what_it_did_is_judged(
    tmp_path: Path, fake_nsys: Callable[..., Path], number: signal.Signals
) -> None:
    """Ctrl-C goes to the whole process group, as a terminal sends it; SIGTERM to ``record`` alone."""
    fake_nsys()
    ready = tmp_path / "ready"
    program = f"{RACY.format('F:w5 L:w5')}\nimport time\nopen({str(ready)!r}, 'w')\ntime.sleep({DEADLINE_S})"
    command = [sys.executable, "-m", "hicache_obs", "record", "-o", str(tmp_path / "out"), *python(program)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + DEADLINE_S
    while not ready.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    if number is signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, error = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 1, out + error
    assert f"under nsys was ended by {number.name}" in out
    assert "findings, 1 page pairs checked" in out
