"""The demo, as its users see it: results, JSON, exit codes, determinism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main

KEYS = {
    "fence", "fences", "restored_pages", "pages_checked", "pairs_checked", "violations", "latent",
    "corrupted_pages", "wrong_requests", "fence_wait_ms_p50", "fence_wait_ms_p99", "avoidable_ms", "rounds",
    "findings",
}  # fmt: skip

SMALL = ("--requests", "30", "--device-pages", "24")
"""Few requests in few pages: the missing fence still spoils pages and tokens, and fences still wait for nothing."""


def demo(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Modes of one run, from the JSON on standard output, which holds nothing else."""
    assert main(["demo", "--json", "-", *arguments]) == code
    modes = json.loads(capsys.readouterr().out)["modes"]
    assert all(mode.keys() >= KEYS for mode in modes)
    assert all(
        {"fingerprint", "hazard", "verdict", "count"} <= finding.keys() for m in modes for finding in m["findings"]
    )
    return list(modes)


def check_three_modes(modes: list[dict[str, Any]]) -> None:
    """What the demo promises of its three policies."""
    none, stream, page = modes
    assert [mode["fence"] for mode in modes] == ["none", "stream", "page"]
    assert none["violations"] > 0
    assert none["corrupted_pages"] > 0
    assert none["unexplained_pages"] == 0
    assert none["wrong_requests"] > 0
    assert none["fences"] == 0
    for mode in (stream, page):
        assert mode["findings"] == []
        assert (mode["violations"], mode["latent"], mode["corrupted_pages"], mode["wrong_requests"]) == (0, 0, 0, 0)
        assert mode["pairs_checked"] > 0
    assert stream["fences_without_conflict"] >= 20
    assert stream["avoidable_ms"] > page["avoidable_ms"]
    assert len({(mode["rounds"], mode["restored_pages"], mode["pages_checked"]) for mode in modes}) == 1


@pytest.mark.slow
def test_threads(capsys: pytest.CaptureFixture[str]) -> None:
    """The default run without a GPU: real threads, a gate that makes the race strike every time."""
    check_three_modes(demo(capsys, "--device", "threads"))


def test_virtual(capsys: pytest.CaptureFixture[str]) -> None:
    """The same on the deterministic device."""
    check_three_modes(demo(capsys, "--device", "virtual", *SMALL))


def test_virtual_runs_are_identical(tmp_path: Path) -> None:
    """Nothing that is printed depends on wall-clock time."""
    texts = []
    for name in ("a.json", "b.json"):
        path = tmp_path / name
        arguments = ["--device", "virtual", "--fence", "none", "--seed", "7", "--json", str(path)]
        assert main(["demo", *arguments, *SMALL]) == 0
        texts.append(path.read_text())

    assert texts[0] == texts[1]
    assert json.loads(texts[0])["modes"][0]["violations"] > 0


def test_eager_reports_the_same_races_as_latent(capsys: pytest.CaptureFixture[str]) -> None:
    """Whether a race struck is luck; that it exists is not."""
    common = ["--device", "virtual", "--fence", "none", *SMALL]
    (struck,) = demo(capsys, *common)
    (lucky,) = demo(capsys, *common, "--schedule", "eager")

    assert (lucky["violations"], lucky["corrupted_pages"], lucky["wrong_requests"]) == (0, 0, 0)
    assert lucky["latent"] == struck["violations"] + struck["latent"] > 0
    by_fingerprint = [{f["fingerprint"]: 0 for f in mode["findings"]} for mode in (lucky, struck)]
    assert by_fingerprint[0] == by_fingerprint[1]


def test_nothing_checked_is_not_clean(capsys: pytest.CaptureFixture[str]) -> None:
    """A run without restores proves nothing."""
    modes = demo(capsys, "--device", "virtual", "--requests", "3", code=3)

    assert [mode["pairs_checked"] for mode in modes] == [0, 0, 0]


def test_table_and_first_finding(capsys: pytest.CaptureFixture[str]) -> None:
    """A person sees one table and one finding in words."""
    assert main(["demo", "--device", "virtual", *SMALL]) == 0
    out = capsys.readouterr().out

    for word in ("none", "stream", "page", "violations", "avoidable", "First finding", "VIOLATION", "fix"):
        assert word in out


def test_the_setting_says_where_the_journal_goes_without_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HICACHE_OBS_JOURNAL", str(tmp_path / "set"))
    command = ["demo", "--device", "virtual", "--fence", "page", "--requests", "20"]

    assert main(command) in (0, 3)  # so few requests may give nothing to check
    assert main([*command, "--journal", str(tmp_path / "flag")]) in (0, 3)
    assert [folder.name for folder in tmp_path.glob("*/page")] == ["page", "page"]
    assert len(list((tmp_path / "set" / "page").iterdir())) == 1


def test_journal_gives_the_same_verdicts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """``check`` on the journal of a run finds what the run found."""
    common = ["--device", "virtual", *SMALL, "--journal", str(tmp_path)]
    none, stream, _ = demo(capsys, *common)

    assert main(["check", "--json", str(tmp_path / "none")]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["outcome"] == "findings"
    assert len(report["races"]) == none["violations"] + none["latent"]
    assert main(["check", "--json", str(tmp_path / "stream")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["outcome"] == "clean"
    assert report["races"] == stream["findings"] == []


@pytest.mark.slow
def test_real_request_trace(capsys: pytest.CaptureFixture[str], shared_data: Path) -> None:
    """Two hundred requests of a public trace, on real threads, at memory speed."""
    workload = shared_data / "data" / "mooncake_conversation_trace.jsonl"
    arguments = ["--runner", "pattern", "--workload", str(workload), "--requests", "200", "--fence", "stream"]
    (mode,) = demo(capsys, "--device", "threads", *arguments)

    assert mode["restored_pages"] > 100
    assert mode["findings"] == []


ALL_POLICIES = (
    "--write-policy", "write_back", "--write-fence", "page", "--host-eviction", "lfu", "--retraction", "backup",
    "--barrier", "read_done", "--chunk-tokens", "64", "--prefetch", "wait",
)  # fmt: skip


def test_every_policy_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each fence has a folder of its own in storage: what is spoiled without fences is not restored with them."""
    folder = tmp_path / "storage"
    arguments = ("--device", "virtual", *SMALL, "--storage", str(folder), *ALL_POLICIES)
    none, stream, page = demo(capsys, *arguments)
    assert none["corrupted_pages"] > 0
    assert none["unexplained_pages"] == 0
    assert (stream["findings"], stream["wrong_requests"], stream["corrupted_pages"]) == ([], 0, 0)
    assert (page["findings"], page["wrong_requests"], page["corrupted_pages"]) == ([], 0, 0)
    assert {path.name for path in folder.iterdir()} == {"none", "stream", "page"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefetch", "wait"], "--prefetch wait: there is no storage; expected --storage URL with it"),
        (["--storage", "/proc/version/x"], "storage /proc/version/x: cannot be made (Not a directory)"),
        (["--storage", "nosuch://x"], "storage nosuch://x: cannot be used"),
        (["--chunk-tokens", "8"], "--chunk-tokens 8: chunks are whole pages; expected at least 16"),
        (["--write-policy", "through"], "'through' is not one of 'write_through', 'write_through_selective'"),
    ],
)
def test_policies_that_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["demo", "--device", "virtual", "--requests", "4", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_the_policies_are_those_of_the_controller() -> None:
    from hicache_obs.cli import demo_policies
    from hicache_obs.controller.eviction import EVICTION_POLICIES
    from hicache_obs.controller.fence_policy import FENCE_POLICIES
    from hicache_obs.controller.scheduler_options import BARRIERS, RETRACTIONS, WRITE_POLICIES
    from hicache_obs.controller.storage_config import PREFETCH_POLICIES

    assert demo_policies.FENCES == FENCE_POLICIES
    assert demo_policies.EVICTIONS == EVICTION_POLICIES
    assert demo_policies.WRITE_POLICIES == WRITE_POLICIES
    assert (demo_policies.RETRACTIONS, demo_policies.BARRIERS) == (RETRACTIONS, BARRIERS)
    assert demo_policies.PREFETCHES == PREFETCH_POLICIES


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv", "fp8", "--host-layout", "page-first-direct", "--io", "direct"],
        pytest.param(["--kv", "mla", "--host-layout", "page-first"], marks=pytest.mark.slow),
        pytest.param(["--graphs"], marks=pytest.mark.slow),
        ["--compact-every", "1"],
        pytest.param(["--kv", "swa"], marks=pytest.mark.slow),
        pytest.param(["--kv", "hybrid"], marks=pytest.mark.slow),
    ],
)
def test_every_form_of_the_pools(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    """The missing fence is found, and both fences are clean, whatever pages hold and wherever they move."""
    small = ["--requests", "40", "--device-pages", "16"]
    modes = demo(capsys, "--device", "virtual", "--runner", "pattern", *small, *flags)
    none, *fenced = modes
    assert none["violations"] + none["latent"] > 0
    assert none["unexplained_pages"] == 0
    for mode in fenced:
        assert (mode["findings"], mode["corrupted_pages"], mode["wrong_requests"]) == ([], 0, 0)
        assert mode["pairs_checked"] > 0


def test_the_defaults_of_the_pattern_runner_restore_pages(capsys: pytest.CaptureFixture[str]) -> None:
    """Small pools: pages that were computed, restored or moved come back, and each wrong one has its finding."""
    none, page = (
        demo(capsys, "--device", "virtual", "--runner", "pattern", "--compact-every", "8", "--fence", fence)[0]
        for fence in ("none", "page")
    )
    assert page["restored_pages"] == page["pairs_checked"] > 100
    assert (page["findings"], page["corrupted_pages"]) == ([], 0)
    assert none["corrupted_pages"] > 0
    assert none["unexplained_pages"] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--graphs"], "--graphs: --runner transformer cannot be captured; expected --runner pattern"),
        (
            ["--kv", "fp8"],
            "--kv fp8: --runner transformer needs one of mha, mla, swa, hybrid; expected --runner pattern",
        ),
        (["--host-layout", "token-first"], "'token-first' is not one of 'layer-first', 'page-first'"),
        (["--io", "dma"], "'dma' is not one of 'kernel', 'direct'"),
        (["--compact-every", "-1"], "--compact-every"),
    ],
)
def test_pools_that_do_not_exist(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["demo", "--device", "virtual", "--requests", "1", *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_choices_are_those_of_the_controller() -> None:
    """The command may not import torch to list them."""
    from hicache_obs.cli import demo as command
    from hicache_obs.controller import cache_pools, page_copies, pools

    assert (command.KV_LAYOUTS, command.HOST_LAYOUTS) == (cache_pools.KV_LAYOUTS, pools.HOST_LAYOUTS)
    assert command.IO_BACKENDS == page_copies.IO_BACKENDS
