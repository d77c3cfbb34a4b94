"""Random engines under random requests: every option, every schedule; ``make fuzz-engine N=1000`` runs more."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hicache_obs.controller.cache_pools import HYBRIDS
from hicache_obs.controller.engine import Engine
from hicache_obs.controller.eviction import EVICTION_POLICIES
from hicache_obs.controller.pattern import PatternRunner
from hicache_obs.controller.scheduler_options import BARRIERS, RETRACTIONS, WRITE_POLICIES
from hicache_obs.controller.storage_backend import FileBackend
from hicache_obs.controller.storage_config import PREFETCH_POLICIES, StorageConfig
from hicache_obs.controller.workloads import Request
from hicache_obs.streams import SCHEDULES
from hicache_obs.testing.chaos import ChaosBackend, Mishaps
from hicache_obs.testing.consistency import check_contents, check_drained, check_engine

SEEDS = int(os.environ.get("HICACHE_OBS_ENGINES", "8"))
FIRST = int(os.environ.get("HICACHE_OBS_FIRST_ENGINE", "0"))
PAGE_SIZE = 4


def any_requests(lab, dice: random.Random) -> list[Request]:
    requests = lab.requests(
        dice.randint(1, 24),
        seed=dice.randrange(10_000),
        reuse=dice.choice([0.3, 0.8, 0.95]),
        conversations=dice.choice([2, 6]),
        max_blocks=dice.choice([3, 8]),
        max_output=dice.choice([1, 4, 12, 24]),
        output_mean=dice.choice([340.0, 1500.0, 2500.0]),
    )
    return [replace(request, priority=dice.randrange(3)) for request in requests]


def any_setup(dice: random.Random, requests: list[Request]) -> dict[str, Any]:
    write_policy = dice.choice(WRITE_POLICIES)
    largest = max(-(-(len(request.prompt) + request.output_length + 1) // PAGE_SIZE) for request in requests)
    hybrid = {}
    if dice.random() < 0.5:
        hybrid = {
            "kv": dice.choice(HYBRIDS),
            "window": dice.choice([2, 5, 8]),
            "window_pages": largest + dice.choice([0, 3]),
        }
    return {
        **hybrid,
        "fence": dice.choice(["stream", "page"]),
        "write_fence": dice.choice([None, "stream", "page"]),
        "seed": dice.randrange(1000),
        "device_pages": largest + dice.choice([0, 1, 4, 12]),
        "host_pages": dice.choice([6, 20, 64]),
        "max_running": dice.choice([1, 3, 6]),
        "max_extend_tokens": dice.choice([4, 16, 64]),
        "early_backup": write_policy == "write_through" and dice.random() < 0.5,
        "poll_acks": dice.random() < 0.3,
        "policies": {
            "chunked_prefill": dice.random() < 0.5,
            "write_policy": write_policy,
            "write_threshold": dice.choice([1, 2, 3]),
            "host_eviction": dice.choice(EVICTION_POLICIES),
            "retraction": dice.choice(RETRACTIONS),
            "barrier": dice.choice(BARRIERS),
        },
    }


def any_storage(dice: random.Random, folder: str) -> StorageConfig:
    return StorageConfig(
        folder,
        prefetch=dice.choice(PREFETCH_POLICIES),
        timeout_ms=dice.choice([0, 10]),
        least_pages=dice.choice([1, 2]),
        lookahead=dice.choice([1, 4]),
        batch_pages=dice.choice([1, 8]),
        max_backup_pages=dice.choice([4, 4096]),
        max_prefetch_pages=dice.choice([0, 4]),
        read_bytes_per_s=dice.choice([0, 1_000_000]),
        max_restarts=dice.choice([0, 3]),
    )


def any_mishaps(dice: random.Random) -> Mishaps:
    if dice.random() < 0.5:
        return Mishaps()
    chances = [0.0, 0.0, 0.05, 0.3]
    return Mishaps(*(dice.choice(chances) for _ in range(4)), kills=dice.choice([0.0, 0.02]))


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["pattern", "transformer"])
def test_any_engine(lab, tmp_path, runner):
    """Right tokens, right contents, no page lost or owned twice, nothing found; storage of an earlier run included."""
    total: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + SEEDS):
        dice = random.Random(seed)
        requests = any_requests(lab, dice)
        setup = any_setup(dice, requests)
        kinds = {name: setup[name] for name in ("kv", "window") if name in setup}
        reference = lab.run(
            requests, runner=runner, backend="virtual-eager", device_pages=400, host_tier=False, record=False, **kinds
        )
        stored = not kinds and dice.random() < 0.8
        config = any_storage(dice, str(tmp_path / f"{seed}")) if stored else None
        mishaps = any_mishaps(dice)
        for schedule in SCHEDULES:
            store = None
            if config is not None:
                store = ChaosBackend(FileBackend(tmp_path / f"{seed}"), mishaps, seed=seed)
            where = {"backend": f"virtual-{schedule}", "runner": runner, "storage": config, "store": store}
            try:
                run = lab.run(requests, after_step=check_engine, **where, **setup)
                check_run(run, reference)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {schedule}, storage {config}, {mishaps}: {setup}") from error
            count(total, run.engine, store)
        lab.close()
    assert total["chunks"] > 0
    assert total["evicting"] > 0
    assert total["restored"] > 0
    assert total["retractions"] > 0
    assert total["stored"] > 0
    assert total["prefetched"] > 0
    assert total["tombstones"] > 0
    assert total["passed"] > 0


def check_run(run, reference) -> None:
    assert run.outputs == reference.outputs
    assert run.findings == []
    assert run.corrupted == []
    check_drained(run.engine)
    check_contents(run.engine, reference.engine, exact=isinstance(run.engine.runner, PatternRunner))


def count(total: Counter[str], engine: Engine, store: ChaosBackend | None) -> None:
    scheduler = engine.scheduler
    total["chunks"] += scheduler.counters.chunks
    total["retractions"] += scheduler.counters.retractions
    total["restored"] += engine.controller.counters.restored_pages
    total["evicting"] += engine.controller.counters.evicting_write_backs
    total["tombstones"] += scheduler.pages.partial.tombstones
    total["passed"] += scheduler.pages.partial.passed
    if scheduler.storage is not None:
        total["stored"] += scheduler.storage.tier.counters.stored_pages
        total["prefetched"] += scheduler.storage.counters.prefetched_pages
