"""Pools: their sizes, their fill, and the refusal of one that does not fit."""

import re
from pathlib import Path

import pytest
import torch

from hicache_obs.controller import pools
from hicache_obs.controller.pools import DevicePool, HostPool, KVLayout, poison
from hicache_obs.errors import ConfigError

SMALL = KVLayout(layers=3, pages=5, page_size=4, heads=2, head_dim=8)


@pytest.mark.parametrize(
    ("dtype", "element"), [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)]
)
def test_sizes_follow_from_the_shape(dtype: torch.dtype, element: int) -> None:
    layout = KVLayout(3, 5, 4, 2, 8, dtype)
    assert layout.page_bytes_per_layer == 2 * 4 * 2 * 8 * element  # K and V
    assert layout.page_bytes == 3 * layout.page_bytes_per_layer
    assert layout.pool_bytes == 5 * layout.page_bytes
    pool = DevicePool(layout, "cpu")
    assert pool.k.nbytes + pool.v.nbytes == layout.pool_bytes


@pytest.mark.parametrize("name", ["layers", "pages", "page_size", "heads", "head_dim"])
def test_layout_refuses_a_size_below_one(name: str) -> None:
    sizes = {"layers": 1, "pages": 1, "page_size": 1, "heads": 1, "head_dim": 1, name: 0}
    with pytest.raises(ConfigError, match=f"^{name}: 0; expected an integer ≥ 1$"):
        KVLayout(**sizes)


@pytest.mark.parametrize("make", [lambda: DevicePool(SMALL, "cpu"), lambda: HostPool(SMALL, pinned=False)])
def test_new_pool_holds_poison_everywhere(make: object) -> None:
    assert callable(make)
    pool = make()
    assert pool.layout is SMALL
    for tensor in (pool.k, pool.v):
        assert tensor.shape == SMALL.shape == (3, 5, 4, 2, 8)
        assert tensor.is_contiguous()
        assert (tensor == poison(torch.float64)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_poison_is_exact_and_finite_in_its_type(dtype: torch.dtype) -> None:
    value = torch.full((), poison(dtype), dtype=torch.float64)
    assert value.to(dtype).to(torch.float64) == value
    assert torch.isfinite(value)


def test_poison_spoils_an_unmasked_read_and_no_masked_one() -> None:
    keys = torch.ones(2, 4, dtype=torch.float64)
    values = torch.ones(2, 4, dtype=torch.float64)
    keys[1] = values[1] = poison(torch.float64)  # position 1 was never written
    scores = keys @ torch.full((4,), 0.5, dtype=torch.float64)
    masked = torch.softmax(scores.masked_fill(torch.tensor([False, True]), -torch.inf), 0) @ values
    assert (masked == 1).all()
    assert (torch.softmax(scores, 0) @ values > 1e20).all()


def test_host_pool_that_does_not_fit_is_refused_by_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "host_available_bytes", lambda: int(20.1 * 2**30))
    layout = KVLayout(layers=4, pages=1_000_000, page_size=16, heads=8, head_dim=8)
    with pytest.raises(ConfigError) as refused:
        HostPool(layout, pinned=False)
    assert str(refused.value) == "--host-pages 1000000: the pool needs 61.0 GiB, 20.1 GiB are available"


def test_device_pool_on_a_cpu_counts_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "host_available_bytes", lambda: SMALL.pool_bytes - 1)
    with pytest.raises(ConfigError, match=r"^--device-pages 5: the pool needs 0\.0 GiB, 0\.0 GiB are available$"):
        DevicePool(SMALL, "cpu")
    monkeypatch.setattr(pools, "host_available_bytes", lambda: SMALL.pool_bytes)
    assert DevicePool(SMALL, "cpu").k.shape == SMALL.shape


def test_failed_allocation_is_refused_by_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_args: object, **_options: object) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(torch, "empty", no_memory)
    expected = r"^--device-pages 5: .* are available, but the allocation failed: not enough memory$"
    with pytest.raises(ConfigError, match=expected):
        DevicePool(SMALL, "cpu")


def test_available_memory_is_plausible() -> None:
    total = int(re.findall(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())[0]) * 1024
    assert 0 < pools.host_available_bytes() < total


def test_available_memory_heeds_the_memory_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_CGROUP", tmp_path)
    monkeypatch.setattr(pools, "_meminfo_available_bytes", lambda: 10_000)
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 500\n")
    for limit, available in (("5000\n", 2500), ("max\n", 10_000), ("50000\n", 10_000), ("1000\n", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert pools.host_available_bytes() == available


@pytest.mark.parametrize(("asked", "taken"), [(1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_pinned_memory_is_counted_as_torch_takes_it(asked: int, taken: int) -> None:
    assert pools._power_of_two(asked) == taken


@pytest.mark.skipif(torch.cuda.is_available(), reason="gpu: the refusal is for machines without a CUDA device")
def test_pinned_pool_needs_a_device() -> None:
    with pytest.raises(ConfigError, match=r"^pinned: True; page-locked host memory needs a CUDA device"):
        HostPool(SMALL, pinned=True)


@pytest.mark.gpu
def test_pools_on_a_gpu() -> None:
    device, host = DevicePool(SMALL, "cuda"), HostPool(SMALL, pinned=True)
    assert device.k.is_cuda
    assert host.k.is_pinned()
    assert host.v.is_pinned()
    assert (device.v == poison(torch.float64)).all()
    with pytest.raises(ConfigError, match=r"^--device-pages 1000000000: the pool needs"):
        DevicePool(KVLayout(4, 10**9, 16, 8, 8), "cuda")
