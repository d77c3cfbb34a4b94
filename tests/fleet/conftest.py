"""Journals of two servers, and workers to analyse them with."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.records import Ranks
from hicache_obs.testing.fleet_ranks import Fault, ServerRank, write_rank

ROUNDS = 150
SKEW_NS = 1_000_000
FAULTS = {1: {Fault.RACE: 40}, 2: {Fault.EVICTS_MORE: 55}, 3: {Fault.LOSES_RECORDS: 90, Fault.SKIPS_COLLECTIVE: 50}}
"""Of the tensor-parallel ranks of the second server."""


@pytest.fixture(scope="session")
def fleet_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``nodeN/journals/<rank's folder>``: a server of four ranks per node; that of node0 has no fault."""
    folder = tmp_path_factory.mktemp("fleet")
    for dp in range(2):
        for tp in range(4):
            faults = FAULTS.get(tp, {}) if dp else {}
            rank = ServerRank(Ranks(tp=tp, dp=dp), ROUNDS, faults, skew_ns=tp * SKEW_NS)
            write_rank(folder / f"node{dp}" / "journals", rank)
    return folder


@pytest.fixture(scope="session")
def need_fleet() -> None:
    """The packages of the extra ``fleet``, or a skip; a failure where everything was announced to be installed."""
    missing = [name for name in ("distributed", "fsspec", "cryptography") if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"tool: {', '.join(missing)} not installed; pip install 'hicache-obs[fleet]'"
        if os.environ.get("HICACHE_OBS_REQUIRE") == "all":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def workers(need_fleet: None) -> Iterator[Any]:
    """Two workers of this machine."""
    from hicache_obs.fleet.cluster import local_workers

    with local_workers(2) as executor:
        yield executor
