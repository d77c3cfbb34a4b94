"""``--accepted``, ``--events`` and ``--otlp`` as users meet them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main

RACE = "tests/cases/01-loadback-over-inflight-forward.json"
DEMO = ("demo", "--device", "virtual", "--requests", "30", "--device-pages", "24")


@pytest.fixture
def race(checkout: Path) -> str:
    """A scenario with one race."""
    return str(checkout / RACE)


def accept(path: Path, *names: str, expires: str = "2999-01-01") -> str:
    """An ``accepted.toml`` for these fingerprints."""
    path.write_text("".join(f'[{name}]\nreason = "we know"\nexpires = {expires}\n' for name in names))
    return str(path)


def fingerprints(capsys: pytest.CaptureFixture[str], file: str) -> list[str]:
    assert main(["check", "--json", file]) == 1
    return [race["fingerprint"] for race in json.loads(capsys.readouterr().out)["races"]]


def test_an_accepted_race_is_marked_and_not_unexpected(
    capsys: pytest.CaptureFixture[str], race: str, tmp_path: Path
) -> None:
    file = accept(tmp_path / "accepted.toml", *fingerprints(capsys, race))

    assert main(["check", "--accepted", file, race]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].endswith(" accepted")
    assert "accepted until 2999-01-01: we know" in text
    assert main(["check", "--accepted", file, "--json", race]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {r["accepted"]["reason"] for r in report["races"]} == {"we know"}


def test_another_fingerprint_accepts_nothing(capsys: pytest.CaptureFixture[str], race: str, tmp_path: Path) -> None:
    assert main(["check", "--accepted", accept(tmp_path / "accepted.toml", "HC-00000000"), race]) == 1
    assert "accepted until" not in capsys.readouterr().out


def test_an_acceptance_that_expired_counts_again_and_says_so(
    capsys: pytest.CaptureFixture[str], race: str, tmp_path: Path
) -> None:
    name = fingerprints(capsys, race)[0]
    file = accept(tmp_path / "accepted.toml", name, expires="2020-01-01")
    assert main(["check", "--accepted", file, race]) == 1
    assert f"{name}: its acceptance expired on 2020-01-01; it counts again" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [("check", RACE), ("analyze", RACE), DEMO, ("agent", "--once")], ids=lambda command: command[0]
)
def test_a_malformed_file_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "accepted.toml").write_text("[HC-00000000]\nreason = 'x'\n")
    assert main([*command, "--accepted", str(tmp_path / "accepted.toml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "HC-00000000 has no 'expires'" in line


def test_the_setting_does_what_the_flag_does(
    capsys: pytest.CaptureFixture[str], race: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE_OBS_ACCEPTED", accept(tmp_path / "a.toml", *fingerprints(capsys, race)))
    assert main(["check", race]) == 0


@pytest.mark.slow
def test_demo_writes_its_findings_as_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert main([*DEMO, "--fence", "none", "--events", str(path), "--json", "-"]) == 0
    modes = json.loads(capsys.readouterr().out)["modes"]
    expected: dict[str, int] = {}
    for finding in (finding for mode in modes for finding in mode["findings"]):
        expected[finding["fingerprint"]] = expected.get(finding["fingerprint"], 0) + finding["count"]
    told: dict[str, int] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        told[line["fingerprint"]] = line["count"]
        assert line["replay"].startswith("hicache-obs replay DIR/none, after hicache-obs demo --journal DIR")
    assert told == expected != {}


@pytest.mark.slow
def test_demo_results_do_not_depend_on_who_listens(
    tmp_path: Path, otlp_receiver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody, a dead endpoint, a slow one and a good one give the same numbers."""
    monkeypatch.setenv("HICACHE_OBS_SPAN_ONE_IN", "10")
    good, slow, dead = otlp_receiver(), otlp_receiver(), otlp_receiver()
    slow.accepting.clear()
    dead.close()
    texts = []
    for number, endpoint in enumerate((None, dead.url, slow.url, good.url)):
        path = tmp_path / f"{number}.json"
        sent = ["--otlp", endpoint] if endpoint else []
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30" if endpoint == good.url else "1")
        assert main([*DEMO, "--fence", "none", "--json", str(path), *sent]) == 0
        texts.append(path.read_text())

    assert texts[1:] == texts[:1] * 3
    assert json.loads(texts[0])["modes"][0]["violations"] > 0
    rounds = good.named("hicache.forward_round")
    assert any(span.events for span in rounds)
    assert all(any(link.attributes[0].value.string_value == "request" for link in span.links) for span in rounds)
    traces = {span.trace_id for span in good.spans}
    assert good.exemplars
    assert {exemplar.trace_id for exemplar in good.exemplars} <= traces


def test_a_bad_endpoint_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEMO, "--otlp", "localhost:4317"]) == 2
    assert capsys.readouterr().err == (
        "hicache-obs: --otlp localhost:4317: not an address; expected http://HOST:PORT or https://HOST:PORT\n"
    )


def test_doctor_lists_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("ACCEPTED", "EVENTS", "EVENTS_MAX_BYTES", "EVENTS_INTERVAL_S", "SPAN_ONE_IN", "SPAN_QUEUE"):
        assert f"HICACHE_OBS_{name}" in out


def test_nothing_of_the_extra_is_imported_unless_it_is_asked_for() -> None:
    import subprocess
    import sys

    program = "import sys; from hicache_obs.cli import main; main(['check', '--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "hicache_obs.exporters.accepted" in done.stdout
    for name in ("'grpc'", "'opentelemetry'", "'torch'", "hicache_obs.exporters.otel'"):
        assert name not in done.stdout
