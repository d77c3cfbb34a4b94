"""Files that are no traces, or broken ones: one line that names the file and the step, exit code 2, at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main
from hicache_obs.readers import journal, open_trace
from hicache_obs.recorder import RingWriter
from hicache_obs.testing import History

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "hicache_obs"]
commands = pytest.mark.parametrize("command", ["check", "replay"])


def refused(capsys: pytest.CaptureFixture[str], command: str, path: Path) -> str:
    """The single error line of a command that must fail with exit code 2, without the file's name."""
    before = {file: file.lstat().st_mtime_ns for file in path.parent.iterdir()}
    code = main([command, str(path)])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"hicache-obs: {path}: ")
    assert before == {file: file.lstat().st_mtime_ns for file in path.parent.iterdir()}, "something was written"
    return captured.err.removeprefix(f"hicache-obs: {path}: ").rstrip("\n")


def steps(*changed: dict[str, Any]) -> str:
    """A scenario whose step s2 is ``changed``."""
    first = {"id": "s1", "op": "kernel", "stream": "a", "writes": [1]}
    return json.dumps({"steps": [first, *changed]})


@commands
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (steps({"id": "s2", "op": "levitate"}), "step s2: op 'levitate' is unknown; known are kernel, memcpy, *"),
        (steps({"id": "s1", "op": "host_sync", "scope": "device"}), "step s1: id 's1' is taken by step number 1; *"),
        (steps({"id": "s2", "op": "event_wait", "stream": "a"}), "step s2: needs key 'event'"),
        (steps({"id": "s2", "op": "event_wait", "event": "e"}), "step s2: needs key 'stream'"),
        (
            steps({"id": "s2", "op": "kernel", "stream": "a", "reads": [-1]}),
            "step s2: key 'reads[[]0[]]': Expected 'int' >= 0; is -1",
        ),
        (
            steps({"id": "s2", "op": "kernel", "stream": "a", "reads": [2**26]}),
            "step s2: key 'reads[[]0[]]': Expected 'int' <= 67108863; is *",
        ),
        (
            steps({"id": "s2", "op": "kernel", "stream": "a", "reads": ["kv2:67108864"]}),
            "step s2: page 'kv2:67108864': must be below 67108864",
        ),
        (steps({"id": "s2", "op": "thread_recv", "chan": "c"}), "step s2: chan 'c' has no post left to receive; *"),
        (steps({"id": "s2", "op": "io_end", "io": "x"}), "step s2: io 'x' has not begun; begun before: none"),
        (steps({"id": "s2"}), "step s2: needs key 'op', a string"),
        (steps({"op": "host_sync", "scope": "device"}), "step number 2: needs key 'id'"),
        (steps({"id": 2, "op": "host_sync"}), "step number 2: key 'id': Expected 'str', got 'int'; is 2"),
        (steps({"id": "s2", "op": "host_sync", "scope": "all"}), "step s2: key 'scope': *'all'*stream, device"),
        (steps({"id": "s2", "op": "kernel", "stream": "a", "colour": 1}), "step s2: unknown key 'colour'; known are *"),
        (
            steps({"id": "s2", "op": "kernel", "stream": None}),
            "step s2: key 'stream': Expected 'str', got 'null'; *",
        ),
        (
            steps({"id": "s2", "op": "kernel", "stream": "a", "dur_us": "1"}),
            "step s2: key 'dur_us': Expected 'float', *",
        ),
        (
            steps({"id": "s2", "op": "kernel", "stream": "a", "dur_us": 1e300}),
            "step s2: key 'dur_us': *<= 1000000000000*",
        ),
        (steps({"id": "s2", "op": "kernel", "stream": "a", "layer": 10**30}), "step s2: key 'layer': *"),
        (steps({"id": "s2", "op": "kernel", "stream": "a", "layer": 0.5}), "step s2: key 'layer': Expected 'int *"),
        ('{"steps": [5]}', "step number 1: is int; must be an object"),
        ('{"steps": 5}', "key 'steps': Expected 'array', got 'int'; is 5"),
        ('{"step": []}', "unknown key 'step'; known are steps, *"),
        ("{}", "needs key 'steps'"),
        ("{", "not JSON that can be read: *"),
        ('{"steps": [{"id": "s1", "op": "kernel", "stream": "a", "dur_us": NaN}]}', "not JSON that can be read: *"),
        (
            '{"steps": [{"id": "s1", "op": "kernel", "stream": "a", "dur_us": Infinity}]}',
            "not JSON that can be read: *",
        ),
        (
            '{"steps": [{"id": "s1", "op": "kernel", "stream": "a", "layer": ' + "9" * 5000 + "}]}",
            "step number 1: Integer value out of range",
        ),
        ('{"steps": ' + "[" * 100_000, "not JSON that can be read: *"),
        ('{"steps": [' + "[" * 5_000 + "]" * 5_000 + "]}", "*recursion*"),
        (
            "[]",
            "not a ring file, *, Parquet, a scenario (JSON) or a profiler's recording; it begins with b'[[][]]'",
        ),
        ("", "is empty"),
        (b'{"steps": [{"id": "\xff", "op": "kernel", "stream": "a"}]}', "*"),
        (b'{"steps": [{"id": "s1", "op": "kernel", "stream": "\xc3"}]}', "step *Invalid UTF-8*"),
        (b"\xff\xfe{\x00}\x00", "not a ring file, *; it begins with *"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) and len(value) < 120 else "",
)
def test_malformed_scenarios(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, text: str | bytes, message: str
) -> None:
    """Names the file, the step and what was allowed."""
    path = tmp_path / "race.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())

    line = refused(capsys, command, path)

    pytest.LineMatcher([line]).fnmatch_lines([message])


@commands
@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b'{"steps": [', "has 1073741824 bytes; a scenario may have 67108864 at most"),
        (b"hicaring", "damaged header: *"),
        (b"\xff\xff\xff\xff", "not a journal: *"),
        (b"", "not a ring file, *"),
    ],
)
def test_a_file_of_a_gigabyte(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, start: bytes, message: str
) -> None:
    """Is refused without being read into memory."""
    path = tmp_path / "huge"
    path.write_bytes(start)
    os.truncate(path, 8192)
    main([command, str(path)])  # loads the command and the reader, which is not what is measured
    capsys.readouterr()
    os.truncate(path, 1 << 30)
    tracemalloc.start()
    try:
        line = refused(capsys, command, path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    pytest.LineMatcher([line]).fnmatch_lines([message])
    assert peak_bytes < 1 << 20


def test_a_large_ring_that_is_mostly_empty(tmp_path: Path) -> None:
    """A ring of the largest size is a sparse file of gigabytes; what was never written is not read."""
    path = tmp_path / "ring"
    writer = RingWriter(path, slots=1 << 20, arena_words=1 << 26)
    kept = [writer.append(record) for record in History("F:w5 L:w5").records]  # type: ignore[arg-type] # all kinds fit
    writer.close()
    tracemalloc.start()
    try:
        trace = open_trace(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert len(trace) == len(kept) == sum(kept)
    assert path.stat().st_size > 600 << 20
    assert peak_bytes < 1 << 20


@commands
def test_what_is_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    """A pipe would block for ever; nothing is opened to find out."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "rank0-000001.arrows")

    assert refused(capsys, command, tmp_path / "gone") == "No such file or directory"
    assert refused(capsys, command, tmp_path / "pipe") == "is a named pipe; must be a regular file"
    assert refused(capsys, command, tmp_path / "loop") == "Too many levels of symbolic links"
    assert refused(capsys, command, tmp_path / "folder").startswith("no journal here: no file is named like ")
    assert main([command, "/dev/zero"]) == 2
    assert capsys.readouterr().err == "hicache-obs: /dev/zero: is a device; must be a regular file\n"
    assert main([command, str(tmp_path / "pipes")]) == 2
    pipe = tmp_path / "pipes" / "rank0-000001.arrows"
    assert capsys.readouterr().err == f"hicache-obs: {pipe}: is a named pipe; must be a regular file\n"


@commands
def test_one_bad_file_among_good_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    """Nothing is printed of the others: a script must not take half an answer for the whole."""
    good = sorted((HERE.parent / "cases").glob("*.json"))[0]
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    if command == "check":
        assert main(["check", "--json", str(good), str(bad)]) == 2
        assert capsys.readouterr().out == ""
    assert main([command, str(good)]) in (0, 1)
    assert capsys.readouterr().out != ""


@commands
def test_without_standard_input(command: str) -> None:
    """No command reads it: a closed one changes nothing."""
    case = sorted((HERE.parent / "cases").glob("*.json"))[0]
    script = f"exec <&-; exec {' '.join(COMMAND)} {command} {case}"

    ended = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == (1 if command == "check" else 0), ended.stderr
    assert ended.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["threads", "virtual"])
def test_an_interrupt_is_one_line(device: str) -> None:
    """Ctrl-C in the middle of a run: exit code 130, as a shell would say, and no traceback."""
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background inherits SIG_IGN
        "from hicache_obs.cli import main\n"
        "from hicache_obs.cli.demo_run import DemoRun\n"
        "before = DemoRun._run\n"
        "def told(self, *arguments):\n"
        "    print('running', flush=True)\n"
        "    return before(self, *arguments)\n"
        "DemoRun._run = told\n"
        f"sys.exit(main(['demo', '--device', '{device}', '--requests', '800']))\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    try:
        assert running.stdout.readline() == "running\n"
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=300)
    finally:
        running.kill()

    assert running.returncode == 130
    assert [line for line in error.splitlines() if line.strip()] == ["hicache-obs: interrupted"]


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("msgspec", ["demo", "--device", "virtual", "--requests", "4", "--workload", "requests.jsonl"]),
        ("msgspec", ["check", "case.json"]),
        ("pyarrow", ["check", "."]),
        ("prometheus_client", ["demo", "--device", "virtual", "--requests", "4", "--serve", "0"]),
    ],
)
def test_a_package_that_is_not_installed(tmp_path: Path, package: str, arguments: list[str]) -> None:
    """Where little is installed, the line says which package a command needs."""
    (tmp_path / "requests.jsonl").write_text("{}\n")
    (tmp_path / "case.json").write_text(steps())
    script = (
        f"import sys\nsys.modules[{package!r}] = None\n"
        f"from hicache_obs.cli import main\nsys.exit(main({arguments!r}))\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    name = package.replace("_", "-")
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr == f"hicache-obs: this needs the package {name}, which is not installed: pip install {name}\n"


LARGEST = 2**26 - 1
UNDER_A_LIMIT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from hicache_obs.cli import main
sys.exit(main(sys.argv[1:]))
"""


def _scattered(ids: range, pools: tuple[str, ...]) -> str:
    """A race on every 512th page: one id for each 4 KiB of a table of eight bytes per page."""
    names = [pool + str(page) if pool else page for pool in pools for page in ids]
    owned = {"pool": "device", "pages": [name for name in names if isinstance(name, int)]}
    work = [{"id": f"s{number}", "op": "kernel", "stream": f"a{number}", "writes": names} for number in range(3)]
    alloc, free = ({"id": op, "op": op, **owned} for op in ("alloc", "free"))
    return json.dumps({"steps": [work[0], alloc, work[1], free, work[2]]})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (_scattered(range(511, LARGEST + 1, 512), ("",)), "page or buffer id *: tables *more than 1024 MiB"),
        (_scattered(range(LARGEST, LARGEST + 1), ("", "b:", "c:", "d:")), "page or buffer id 67108863: tables *"),
        (_scattered(range(0, LARGEST // 4, 1 << 16), ("",)), ""),
    ],
    ids=["one pool", "many pools", "a quarter of it"],
)
@commands
def test_large_ids_take_bounded_memory(tmp_path: Path, text: str, error: str, command: str) -> None:
    """Tables are as long as the largest id: what all of them may take is bounded, and said where it does not do."""
    path = tmp_path / "hostile.json"
    path.write_text(text)
    run = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT, command, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert run.returncode == (2 if error else int(command == "check")), run.stderr
    assert fnmatch(run.stderr, f"hicache-obs: {path}: {error}\n" if error else "")


def test_findings_end_with_the_command_that_replays_them(capsys: pytest.CaptureFixture[str]) -> None:
    cases = HERE.parent / "cases"
    race, fenced = cases / "01-loadback-over-inflight-forward.json", cases / "02-loadback-fenced-twin.json"

    assert main(["check", str(race)]) == 1
    command = capsys.readouterr().out.splitlines()[-2].partition(": hicache-obs ")[2].split()
    assert command == ["replay", str(race)]
    assert main(command) == 0
    assert main(["check", str(fenced)]) == 0
    assert "replay" not in capsys.readouterr().out.removeprefix(str(fenced))


def test_one_rank_of_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Is chosen by --rank, by the command that is printed as well."""
    for rank, text in enumerate(("F:w5 L<F L:w5", "F:w5 L:w5")):
        writer = journal.JournalWriter(tmp_path, rank=rank)
        writer.write(History(text).records)
        writer.close()

    assert main(["check", str(tmp_path)]) == 2
    assert "ranks 0, 1: say which one (--rank N)" in capsys.readouterr().err
    assert main(["check", str(tmp_path), "--rank", "0"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}, rank 0: clean")
    for command in (["check", str(tmp_path), "--rank", "1"], ["analyze", str(tmp_path)]):
        assert main(command) == 1
        line = next(line for line in capsys.readouterr().out.splitlines() if "hicache-obs replay" in line)
        assert line.partition(": hicache-obs ")[2].split() == ["replay", str(tmp_path), "--rank", "1"]
    assert main(["replay", str(tmp_path), "--rank", "1"]) == 0
