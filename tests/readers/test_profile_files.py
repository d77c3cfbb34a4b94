"""Public profiler recordings: each loads, and ``docs/profilers.md`` says what is in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main
from hicache_obs.readers.open_profile import open_profile
from hicache_obs.readers.preflight import count_syncs

ENVIRONMENT = ("TARGET_INFO_SYSTEM_ENV", "PATH=", "HOME=")


@pytest.fixture(scope="module")
def traces(shared_data: Path) -> Path:
    """The folder of recordings."""
    folder = shared_data / "traces"
    if not folder.is_dir():
        pytest.skip("shared data: no traces in it")
    return folder


def test_the_documented_table_is_what_the_files_hold(traces: Path, checkout: Path) -> None:
    """Renew it with ``python docs/profile_table.py FOLDER``."""
    script = [sys.executable, str(checkout / "docs" / "profile_table.py"), str(traces)]
    made = subprocess.run(script, capture_output=True, text=True, timeout=300, check=True, cwd=checkout).stdout

    documented = (checkout / "docs" / "profilers.md").read_text()
    assert documented.endswith("\n\n" + made)
    assert made.count("\n") == 2 + 17


def test_a_wait_pair_and_an_unresolved_query(traces: Path) -> None:
    """Of a real trace, by hand: stream 24 waits for a record on 20; one of three queries names no record."""
    profile = open_profile(traces / "kineto" / "hta_cuda_event_sync_multi_stream.json.gz")
    assert profile is not None
    counts, calls = count_syncs(profile), profile.calls

    (wait,) = [index for index, record in enumerate(calls.record.tolist()) if record >= 0 and calls.kind[index] == 2]
    numbers = [profile.streams[calls.stream[index]].number for index in (calls.record[wait], wait)]
    assert numbers == [20, 24]
    assert (counts.queries, counts.queries_paired) == (3, 2)


def test_digits_that_a_float_loses_are_kept(traces: Path) -> None:
    profile = open_profile(traces / "kineto" / "hta_v100_ns_resolution.json.gz")
    assert profile is not None

    assert len({start % 1000 for start in profile.ops.start_ns.tolist()}) > 900  # a float64 leaves 4 of these


def test_no_environment_string_is_printed(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in sorted((traces / "nsys").glob("*.sqlite")):
        assert main(["analyze", str(file), "--json"]) in (0, 3)
        printed = capsys.readouterr().out
        assert not [word for word in ENVIRONMENT if word in printed]


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("kineto/hta_cuda_event_sync.json.gz", 0, {"outcome": "clean", "level": "provable", "pairs_checked": 2}),
        ("kineto/tracelens_b200_vllm_eager.json.gz", 3, {"outcome": "unknown", "level": "observable only"}),
        ("kineto/hta_simple_add_no_record_corr.json.gz", 3, {"outcome": "unknown", "granularity": "copies"}),
        ("nsys/own_nvtx0.2.17_dummy_nsys2022.4.2.sqlite", 3, {"outcome": "nothing-checked", "level": "not decidable"}),
    ],
)
def test_what_is_said_of_a_file(
    traces: Path, capsys: pytest.CaptureFixture[str], name: str, code: int, expected: dict[str, Any]
) -> None:
    assert main(["analyze", str(traces / name), "--json"]) == code

    report = json.loads(capsys.readouterr().out)
    assert {key: report[key] for key in expected} == expected


def test_lost_ranges_are_named(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost, kept = (traces / "nsys" / f"own_nvtx{v}_nsys2022.4.2.sqlite" for v in ("0.2.17_dummy", "0.2.17_shim"))

    main(["analyze", str(lost)])
    assert "annotations lost -> nvtx 0.2.12 and newer need a newer nsys; install nvtx 0.2.11" in capsys.readouterr().out
    main(["analyze", str(kept)])
    assert "annotations lost" not in capsys.readouterr().out
