"""A real Prometheus scrapes an agent over TLS with its token, and stores exemplars that name received spans."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

pytestmark = pytest.mark.slow

TOKEN = "correct-horse"


@pytest.fixture
def prometheus(require_tool, tmp_path):
    """``prometheus(jobs)``: one that scrapes them every second; returns what asks its API."""
    program = require_tool("prometheus", install="apt-get install prometheus")
    started = []

    def start(jobs):
        intervals = {"scrape_interval": "1s", "scrape_timeout": "1s"}
        (tmp_path / "prometheus.yml").write_text(json.dumps({"global": intervals, "scrape_configs": jobs}))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        options = [f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={address}"]
        with (tmp_path / "prometheus.log").open("wb") as log:
            command = [program, f"--config.file={tmp_path / 'prometheus.yml'}", *options]
            started.append(
                subprocess.Popen([*command, "--enable-feature=exemplar-storage"], stdout=log, stderr=log, cwd=tmp_path)
            )

        def ask(path, **parameters):
            try:
                url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
                with urllib.request.urlopen(url, timeout=20) as answer:
                    return json.load(answer)["data"]
            except urllib.error.URLError:  # still starting
                assert started[-1].poll() is None, (tmp_path / "prometheus.log").read_text()
                return None

        return ask

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def guarded(agent_process, certificate, tmp_path):
    """``guarded()``: an agent that speaks TLS only and asks for ``TOKEN``."""
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    cert, key = map(str, certificate)
    return lambda: agent_process("--tls-cert", cert, "--tls-key", key, "--token-file", str(token))


def job(name, url, **options):
    parts = urllib.parse.urlsplit(url)
    return {"job_name": name, "static_configs": [{"targets": [parts.netloc]}], "scheme": parts.scheme, **options}


def test_only_who_trusts_and_knows_the_token_can_scrape(
    prometheus, guarded, ring, round_of, fill, certificate, tmp_path, eventually
):
    fill(ring(), round_of(1, times=True))
    url = guarded().url()
    assert url.startswith("https://")
    trust = {"tls_config": {"ca_file": str(certificate[0])}}
    known = {"authorization": {"credentials_file": str(tmp_path / "token")}}
    ask = prometheus(
        [
            job("known", url, **trust, **known),
            job("stranger", url, **trust),
            job("liar", url, **trust, authorization={"credentials": f"{TOKEN}r"}),
            job("untrusting", url, **known),
            job("clear", url.replace("https", "http"), **known),
        ]
    )
    refused = {"stranger": "401", "liar": "401", "untrusting": "x509", "clear": ""}
    errors = {}

    def all_tried():
        for one in (ask("targets") or {"activeTargets": []})["activeTargets"]:
            if one["health"] != "unknown" and "deadline" not in one["lastError"]:  # a busy machine
                errors[one["labels"]["job"]] = one["lastError"]
        return len(errors) == 5

    eventually(all_tried)
    assert errors.pop("known") == ""
    assert all(errors.values())
    assert [name for name, error in refused.items() if error not in errors[name]] == [], errors
    eventually(lambda: ask("query", query="sum by (job) (hicache_obs_violations_total) == 1")["result"])
    (found,) = ask("query", query="sum by (job) (hicache_obs_violations_total)")["result"]
    assert found["metric"] == {"job": "known"}


def test_a_stored_exemplar_names_a_received_span(
    prometheus, guarded, ring, round_of, fill, certificate, tmp_path, eventually, otlp_receiver, monkeypatch
):
    receiver = otlp_receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    fill(ring(), round_of(1, times=True))
    known = {
        "tls_config": {"ca_file": str(certificate[0])},
        "authorization": {"credentials_file": str(tmp_path / "token")},
    }
    ask = prometheus([job("known", guarded().url(), **known)])
    found = []

    def stored():
        now = time.time()
        series = ask("query_exemplars", query="hicache_obs_violations_total", start=now - 600, end=now + 60) or []
        found[:] = [one for each in series for one in each["exemplars"] if "trace_id" in one["labels"]]
        return found

    eventually(stored)
    ids = {(span.trace_id.hex(), span.span_id.hex()): span for span in receiver.spans}
    for exemplar in found:
        labels = exemplar["labels"]
        span = ids[labels["trace_id"], labels["span_id"]]
        (event,) = span.events
        told = {one.key: one.value.string_value for one in event.attributes}
        assert told["hicache.fingerprint"] == labels["fingerprint"]
        assert span.links
        assert 0 < span.start_time_unix_nano <= event.time_unix_nano <= span.end_time_unix_nano
