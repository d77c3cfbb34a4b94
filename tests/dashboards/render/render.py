"""Draw a committed dashboard with Grafana's own libraries; see README.md beside this file.

``render.py PICTURE [--board overview.json] [--state safe|racy|idle] [--seconds 40]``
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hicache_obs.costs import FenceCost, TransferCost, TransferKind
from hicache_obs.exporters.catalogue import Phase
from hicache_obs.exporters.prometheus import Metrics, MetricsSink, serve
from hicache_obs.findings import Finding, Hazard, Verdict
from hicache_obs.records import DropReason, OpId, Ranks

HERE = Path(__file__).resolve().parent
WORK = HERE.parents[2] / ".cache" / "dashboard-render"
WATCHED = list(Hazard)[:6]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def build(board: str) -> None:
    """Copy the sources beside their packages, install those once, bundle."""
    shutil.copytree(HERE, WORK, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    if not (WORK / "node_modules").is_dir():
        flags = ["--legacy-peer-deps", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(["npm", "install", *flags], cwd=WORK, check=True)
    (WORK / "public").mkdir(exist_ok=True)
    file = importlib.resources.files("hicache_obs.dashboards") / "grafana" / board
    (WORK / "public" / "dashboard.json").write_text(file.read_text())
    subprocess.run(["npx", "vite", "build", "--logLevel", "warn"], cwd=WORK, check=True)


def finding(verdict: Verdict, hazard: Hazard) -> Finding:
    empty: dict[str, Any] = dict.fromkeys(Finding.__dataclass_fields__)
    return Finding(**{**empty, "verdict": verdict, "hazard": hazard})


def tick(metrics: Metrics, state: str, chance: random.Random) -> None:
    """One tenth of a second of made-up traffic on two ranks."""
    for rank in (Ranks(0), Ranks(1)):
        metrics.set_observable(WATCHED, rank)
        if state == "idle":
            continue
        metrics.set_clock_error(1_200, rank)
        sink = MetricsSink(metrics, rank)
        sink.on_records(400)
        for hazard in WATCHED:
            sink.on_checked(hazard, 256, chance.randrange(2, 20))
        for kind in TransferKind:
            waited_ns = int(chance.lognormvariate(12, 1))
            copy_ns = int(chance.lognormvariate(14, 0.5))
            pages = chance.randrange(16, 256)
            sink.on_fence(FenceCost(OpId(1), kind, waited_ns, int(waited_ns * chance.random())))
            sink.on_transfer(
                TransferCost(kind, 1, copy_ns, copy_ns + waited_ns, pages * 65_536, pages, fenced=state == "safe")
            )
        sink.on_layer_wait(int(chance.lognormvariate(9, 1)))
        metrics.add_overhead(Phase.HOOK, 40_000, rank)
        metrics.add_overhead(Phase.ANALYZE, 400_000, rank)
        if state == "racy" and chance.random() < 0.3:
            sink.on_finding(finding(Verdict.VIOLATION, Hazard.WAW_FORWARD_RESTORE))
            sink.on_finding(finding(Verdict.LATENT, chance.choice(WATCHED)))
            sink.on_weak_ordering(Hazard.HOST_REUSE, "polled", (OpId(1), OpId(2)))
            sink.on_lost(3, DropReason.RING_FULL)


def start_prometheus(stack: ExitStack, target: int) -> str:
    data = WORK / "prometheus"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    (data / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        f"- {{job_name: hicache, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}\n"
    )
    address = f"127.0.0.1:{free_port()}"
    flags = [
        f"--config.file={data / 'prometheus.yml'}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address={address}",
    ]
    process = subprocess.Popen(["prometheus", *flags], stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return f"http://{address}"


def wait_for(url: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{url} does not answer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--board", default="overview.json")
    parser.add_argument("--state", choices=("safe", "racy", "idle"), default="racy")
    parser.add_argument("--seconds", type=int, default=40)
    args = parser.parse_args()
    build(args.board)
    board = json.loads((WORK / "public" / "dashboard.json").read_text())
    with ExitStack() as stack:
        metrics = Metrics(ranks=[Ranks(0), Ranks(1)], engine="render")
        prometheus = start_prometheus(stack, stack.enter_context(serve(metrics, port=0)).port)
        chance = random.Random(7)
        for _ in range(args.seconds * 10):
            tick(metrics, args.state, chance)
            time.sleep(0.1)
        port = free_port()
        preview = subprocess.Popen(
            ["node", "node_modules/vite/bin/vite.js", "preview", "--port", str(port), "--logLevel", "warn"],
            cwd=WORK,
            env={**os.environ, "PROMETHEUS_URL": prometheus},
        )
        stack.callback(preview.wait)
        stack.callback(preview.terminate)
        page = f"http://127.0.0.1:{port}/"
        wait_for(page)
        places = [panel["gridPos"] for panel in board["panels"]]
        height = max(place["y"] + place["h"] for place in places) * 38 + 120
        queries = sum(len(panel.get("targets", [])) for panel in board["panels"])
        url = f"{page}?from=now-{args.seconds}s"
        shot = ["node", "shot.mjs", url, str(args.picture.resolve()), str(height), str(queries)]
        return subprocess.run(shot, cwd=WORK, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
