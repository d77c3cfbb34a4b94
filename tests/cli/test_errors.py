"""Bad input gives one clear line on standard error, exit code 2, and leaves nothing half-written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from hicache_obs.analyzer import order
from hicache_obs.cli import main
from hicache_obs.cli.app import group

QUICK = ["demo", "--device", "virtual", "--requests", "4"]


def _error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The single error line of a run that must fail with exit code 2 and print nothing else."""
    code = main(list(arguments))
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line]
    assert code == 2
    assert captured.out == ""
    assert len(lines) == 1, captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--fnce", "none"], ["--fnce", "--fence"]),
        (["--fence", "stram"], ["'stram'", "none", "stream", "page"]),
        (["--device", "tpu"], ["'tpu'", "cuda", "threads", "virtual"]),
        (["--schedule", "soon"], ["'soon'", "adversarial"]),
        (["--device", "threads", "--schedule", "eager"], ["--schedule eager", "--device virtual"]),
        (["--runner", "llama"], ["'llama'", "transformer", "pattern"]),
        (["--requests", "0"], ["--requests", "0", "x>=1"]),
        (["--requests", "many"], ["--requests", "'many'", "integer"]),
        (["--serve", "99999"], ["--serve 99999", "0 to 65535"]),
        (["--device-pages", "100000000"], ["--device-pages 100000000", "GiB", "available"]),
        (["--host-pages", "100000000"], ["--host-pages 100000000", "GiB", "available"]),
        (["--device-pages", "2"], ["--device-pages 2", "pages"]),
        (["--workload", "no/such.jsonl"], ["no/such.jsonl"]),
        (["--json", "no/such/folder/a.json"], ["--json no/such/folder/a.json", "directory that exists"]),
        (["--json", "-", "--events", "-"], ["--json -, --events -", "standard output", "a file for one"]),
        (["--journal", "/proc/journal"], ["--journal /proc/journal", "writable directory"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_demo_flags(capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]) -> None:
    """The line names the flag, its value and what is allowed."""
    line = _error(capsys, *QUICK, *arguments)

    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["no requests"]),
        ("{}\n", ["line 1", "input_length"]),
        ("not json\n", ["line 1"]),
        ('{"timestamp": 0, "input_length": 600, "output_length": -3, "hash_ids": [1, 2]}\n', ["line 1", "-3"]),
        ('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1]}\n', ["line 1", "hash_ids"]),
    ],
)
def test_workload_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, parts: list[str]) -> None:
    """The line names the file and the line in it."""
    workload = tmp_path / "workload.jsonl"
    workload.write_text(text)

    line = _error(capsys, *QUICK, "--workload", str(workload))

    assert str(workload) in line
    assert all(part in line for part in parts), line


def test_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """The help as it is, on standard error."""
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Usage: hicache-obs [OPTIONS] COMMAND [ARGS]...\n\n")
    assert "\nCommands:\n  demo " in captured.err


def test_a_shell_completes_the_first_word() -> None:
    """For that the command line is parsed without arguments, too."""
    completion = ShellComplete(group, {}, "hicache-obs", "_HICACHE_OBS_COMPLETE")

    assert [item.value for item in completion.get_completions([], "da")] == ["dashboards"]


@pytest.mark.parametrize("printer", ["click.echo", "rich.print"])
@pytest.mark.parametrize("target", ["unread", "full"])
def test_standard_output_that_takes_nothing(printer: str, target: str) -> None:
    """A pipe whose reader has left is not taken for findings; a full disk is one line."""
    script = (
        "import sys, click, rich\n"
        "from hicache_obs.cli import doctor, main\n"
        f"doctor.command.callback = lambda: {printer}('text')\n"
        "sys.exit(main(['doctor']))\n"
    )
    if target == "full":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(output)

    if target == "unread":
        assert (ended.returncode, ended.stderr) == (141, "")
    else:
        assert ended.returncode == 2
        assert ended.stderr.startswith("hicache-obs: the output cannot be written: No space left on device\n")
        assert "Traceback" not in ended.stderr


def test_busy_port(capsys: pytest.CaptureFixture[str]) -> None:
    """The port is taken before anything runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        line = _error(capsys, *QUICK, "--serve", str(port))

    assert f"{port}" in line
    assert "in use" in line


def test_a_failed_run_leaves_an_existing_json_file_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The file is written at the end, whole; a run that fails before does not touch it."""
    result = tmp_path / "result.json"
    result.write_text('{"old": true}')

    _error(capsys, *QUICK, "--json", str(result), "--device-pages", "100000000")

    assert json.loads(result.read_text()) == {"old": True}
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.json", "{", []),
        ("a.json", '{"steps": [{"id": "s1", "op": "levitate"}]}', ["levitate"]),
        ("a.bin", "hello", []),
        ("a.bin", "", ["a.bin: is empty"]),
    ],
)
def test_check_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str, parts: list[str]
) -> None:
    """A file that is no trace is named."""
    path = tmp_path / name
    path.write_text(text)

    line = _error(capsys, "check", str(path))

    assert name in line
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["check"], "Missing argument 'FILE...'; see 'hicache-obs check --help'"),
        (["report", "x"], "Missing option '-o' / '--output'; see 'hicache-obs report --help'"),
        (["status", "--piid", "3"], "No such option '--piid'. Did you mean '--pid'? see 'hicache-obs status --help'"),
        (["chekc"], "No such command 'chekc'; did you mean 'check'? 'hicache-obs --help' lists them"),
        (["xyz"], "No such command 'xyz'; 'hicache-obs --help' lists them"),
    ],
)
def test_usage_errors_lead_to_the_help(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    assert _error(capsys, *arguments) == f"hicache-obs: {line}"


@pytest.mark.parametrize(
    ("variable", "value", "parts"),
    [
        ("HICACHE_OBS_POLL_MS", "often", ["'often'", "an integer from 10 to 60000"]),
        ("HICACHE_OBS_POLL_MS", "5", ["5", "10 to 60000"]),
        ("HICACHE_OBS_RING_SLOTS", "1000", ["1000", "a power of two from 64"]),
    ],
)
def test_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, parts: list[str]
) -> None:
    """A bad environment variable is named with what is allowed, before anything runs."""
    monkeypatch.setenv(variable, value)

    line = _error(capsys, *QUICK)

    assert variable in line
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("command", [["analyze"], ["convert", "-o", "x.json"], ["report", "-o", "x.html"]])
def test_more_streams_than_have_clocks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """What the analyzer refuses is said with the name of the file, and nothing is written."""
    monkeypatch.setattr(order, "MAX_ACTORS", 3)
    monkeypatch.chdir(tmp_path)
    events = [
        {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": 10 * n + delay, "dur": 1, "args": args}
        for n in range(4)
        for cat, name, delay, args in (
            ("cuda_runtime", "cudaLaunchKernel", 0, {"correlation": n + 1}),
            ("kernel", "k", 5, {"correlation": n + 1, "stream": n, "device": 0, "context": 1}),
        )
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))

    line = _error(capsys, command[0], str(file), *command[1:])
    assert line == f"hicache-obs: {file}: more than 3 streams, host threads and graph entries, all together"
    assert list(tmp_path.iterdir()) == [file]
