"""Host pools whose copy functions carry a hook, and those that copy in functions of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hicache_obs.findings import Hazard


def load(self, device_pool, host_indices, device_indices, layer_id, io_backend):
    pass


def host_pool(owner, name, kind):
    """An object of class ``kind``, which has the copy function ``name`` from class ``owner``."""
    function = type(load)(load.__code__, {})
    function.__qualname__ = f"{owner}.{name}"
    base = type(owner, (), {name: function})
    return type(kind, (base,), {})()


PHYSICAL, OLD = "load_to_device_per_layer_physical", "load_to_device_per_layer"
POOLS = [
    ("HostKVCache", PHYSICAL, "MambaPoolHost", True),
    ("LogicalHostPool", PHYSICAL, "LogicalHostPool", True),
    ("UnifiedPageEnvelopeHostPool", PHYSICAL, "UnifiedPageEnvelopeHostPool", False),
    ("MHATokenToKVPoolHost", OLD, "MHATokenToKVPoolHost", True),
    ("MambaPoolHost", OLD, "MambaPoolHost", False),
]


@pytest.mark.parametrize("direction", ["host_to_device", "device_to_host"])
@pytest.mark.parametrize(("owner", "name", "kind", "seen"), POOLS)
def test_a_pool_that_copies_by_itself_makes_the_transfers_unobservable(server, owner, name, kind, seen, direction):
    it = server()
    transfers = [SimpleNamespace(host_pool=host_pool(owner, name, kind))]
    engine = SimpleNamespace(host_to_device_stream=it.stream(8), device_to_host_stream=it.stream(9))
    it.call(f"L2TransferEngine.submit_{direction}", engine, transfers)
    expected = {} if seen else {Hazard.WAW_FORWARD_RESTORE: f"{kind} copies pages in functions of its own"}
    found = it.session.missing
    assert {hazard: found[hazard] for hazard in found if hazard in (Hazard.WAW_FORWARD_RESTORE,)} == expected
    assert (Hazard.RAW_FORWARD_BACKUP in found) is not seen
    assert it.session.counters.errors == {}


@pytest.mark.parametrize("start", ["start_loading", "start_writing"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("owner", "name", "kind", "seen"), POOLS[3:])
def test_before_there_was_an_engine_the_controllers_own_pools_are_asked(
    server, owner, name, kind, seen, grouped, start
):
    it = server()
    pool = host_pool(owner, name, kind)
    group = SimpleNamespace(entries=[SimpleNamespace(host_pool=pool)])
    controller = SimpleNamespace(
        load_queue=[1],
        write_queue=[1],
        load_stream=it.stream(8),
        write_stream=it.stream(9),
        mem_pool_host=group if grouped else pool,
        layer_done_counter=SimpleNamespace(events=[]),
    )
    it.call(f"HiCacheController.{start}", controller)
    assert (Hazard.WAW_FORWARD_RESTORE in it.session.missing) is not seen
    assert it.session.counters.errors == {}
