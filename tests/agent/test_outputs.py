"""The agent's findings as lines, its spans and its exemplars, from rings of other processes."""

from __future__ import annotations

import json
import os
import signal
import urllib.request

from hicache_obs.cli import main


def test_findings_of_all_ranks_are_lines_and_spans_are_sent(
    agent_process, ring, tmp_path, round_of, fill, eventually, otlp_receiver
):
    receiver, events = otlp_receiver(), tmp_path / "events.jsonl"
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "10"}
    os.environ.update(environment)  # the fixture passes this process's on
    try:
        agent = agent_process("--events", str(events), "--journal", str(tmp_path / "j"))
    finally:
        for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_BSP_SCHEDULE_DELAY"):
            del os.environ[name]
    agent.url()
    for tp in range(2):
        fill(ring(tp), round_of(1, times=True))
    eventually(lambda: events.exists() and events.read_text().count("\n") >= 1)
    eventually(lambda: len([s for s in receiver.named("hicache.forward_round") if s.events]) == 2)  # rings are silent
    assert agent.end(signal.SIGTERM) == 0
    lines = [json.loads(line) for line in events.read_text().splitlines()]

    assert [line["event"] for line in lines] == ["finding", "summary"]
    assert lines[-1]["ranks"] == ["dp0 pp0 tp0", "dp0 pp0 tp1"]
    assert lines[0]["replay"].startswith(f"hicache-obs replay {tmp_path}/j/scheduler-dp0-pp0-tp0")
    assert {sender["hicache.tp_rank"] for sender in receiver.resources} == {0, 1}
    assert {sender["service.instance.id"].split(":")[1] for sender in receiver.resources} == {
        "dp0-pp0-tp0",
        "dp0-pp0-tp1",
    }


def test_once_with_accepted_findings_is_clean(ring, rings, tmp_path, round_of, fill, capsys):
    writer = ring()
    fill(writer, round_of(1, times=True))
    writer.close()
    events = tmp_path / "events.jsonl"
    copies = tmp_path / "copies"
    copies.mkdir(mode=0o700)
    for path in rings.glob("*.ring"):
        (copies / path.name).write_bytes(path.read_bytes())
    assert main(["agent", "--dir", str(rings), "--once", "--events", str(events)]) == 1
    name = json.loads(events.read_text().splitlines()[0])["fingerprint"]
    (tmp_path / "accepted.toml").write_text(f'[{name}]\nreason = "known"\nexpires = 2999-01-01\n')
    assert main(["agent", "--dir", str(copies), "--once", "--accepted", str(tmp_path / "accepted.toml")]) == 0


def test_accepted_findings_have_a_counter_of_their_own(
    agent_process, ring, tmp_path, round_of, fill, value, eventually, capsys
):
    fill(ring(0), round_of(1, times=True))
    probe = agent_process("--once", "--events", str(tmp_path / "e"), "--journal", str(tmp_path / "j"))
    assert probe.process.wait(60) == 1
    name = json.loads((tmp_path / "e").read_text().splitlines()[0])["fingerprint"]
    (tmp_path / "accepted.toml").write_text(f'[{name}]\nreason = "known"\nexpires = 2999-01-01\n')
    agent = agent_process("--accepted", str(tmp_path / "accepted.toml"))
    url = agent.url()
    fill(ring(1), round_of(1, times=True))

    def scrape(page: str = url) -> str:
        with urllib.request.urlopen(page) as answer:
            return answer.read().decode()

    hazard = {"tp_rank": "1", "hazard": "waw_forward_restore"}
    eventually(lambda: value(scrape(), "accepted_total", **hazard) == 1)
    assert value(scrape(), "violations_total", **hazard) == 0
    page = scrape(url.removesuffix("metrics"))
    assert "Accepted until 2999-01-01, UTC: known" in page
    assert "every one is ordered but the 1 that is accepted" in page
    assert agent.end() == 0
