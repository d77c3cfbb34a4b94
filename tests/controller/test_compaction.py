"""Pages that move while rounds are in flight: nobody notices, and the gate is needed for that."""

from __future__ import annotations

import pytest

from hicache_obs.errors import ConfigError
from hicache_obs.findings import Cause, Hazard
from hicache_obs.records import Relocate
from hicache_obs.testing.protections import without_move_gate, without_wait_for_moves

BACKENDS = ["virtual-eager", "virtual-lazy", "virtual-random", "virtual-adversarial", "threads"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fence", ["stream", "page"])
def test_nobody_notices_that_pages_move(lab, backend, fence):
    requests = lab.requests(seed=3)
    run = lab.run(requests, backend=backend, fence=fence, compact_every=1, device_pages=28)
    assert run.findings == []
    assert run.corrupted == []
    assert run.outputs == lab.reference(requests)
    assert run.engine.compactor.moved_pages > 20
    moves = run.of_kind(Relocate)
    assert len(moves) > 5
    assert sum(len(move.accesses[0].ids) for move in moves) == run.engine.compactor.moved_pages
    assert all((move.accesses[1].ids < move.accesses[0].ids).all() for move in moves)


@pytest.mark.parametrize("fence", ["stream", "page"])
@pytest.mark.parametrize("remove", [without_move_gate, without_wait_for_moves])
def test_without(lab, remove, fence):
    requests = lab.requests(seed=3)
    run = lab.run(requests, fence=fence, prepare=remove, compact_every=1, device_pages=20)
    assert set(run.hazards) == {Hazard.RELOCATION}
    # A page that is used where it no longer is, and one that is put where somebody still writes.
    assert {finding.cause for finding in run.findings} == {Cause.STALE_ADDRESS, Cause.MISSING_FENCE}
    assert run.corrupted != [] or run.outputs != lab.reference(requests)


def test_an_independent_judge_finds_the_same_races(lab, judge):
    run = lab.run(lab.requests(10, seed=3), prepare=without_wait_for_moves, compact_every=1, device_pages=14)
    assert run.races == judge(run.records) != set()


@pytest.mark.parametrize("kv", ["mla", "fp8"])
def test_every_form_of_the_pools_moves(lab, kv):
    requests = lab.requests(seed=3)
    run = lab.run(requests, compact_every=1, device_pages=28, kv=kv)
    assert run.outputs == lab.reference(requests, kv=kv)
    assert run.engine.compactor.moved_pages > 20
    assert run.findings == []


def test_moved_pages_are_verified(lab):
    """Each is a new tenancy; a round that reads one recomputes its digest."""
    run = lab.run(lab.requests(seed=3), compact_every=1, device_pages=28)
    moves = run.of_kind(Relocate)
    places = {(restored.device_page) for restored in run.engine.scheduler.restored.values()}
    assert {page for move in moves for page in move.accesses[1].ids.tolist()} <= places


def test_compaction_keeps_the_order_of_free_pages(lab):
    """Whoever allocates next gets the page it would have got, but for those that were moved to."""
    engine, _ = lab.build(lab.setup(compact_every=1), lab.requests(2))
    before = engine.scheduler.device_pages._stack.copy()
    engine.compactor._plan()
    assert (engine.scheduler.device_pages._stack == before).all()


def test_it_needs_steps(lab):
    with pytest.raises(ConfigError, match=r"^--compact-every -1: expected an integer ≥ 1$"):
        lab.build(lab.setup(compact_every=-1), lab.requests(2))
