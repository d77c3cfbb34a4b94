"""What the audit reads out of a release's source, on small sources that have or lack one line."""

from __future__ import annotations

import json

import pytest

from hicache_obs.cli import main
from hicache_obs.sglang.audit import COARSE, Verdict, audit, barrier

CONTROLLER = """
class HiCacheController:
    def start_loading(self):
        {load}
    def start_writing(self):
        {write}
"""
FENCES = {
    "load": "self.l2_transfer_engine.host_to_device_stream.wait_stream(self.load_fence_stream)",
    "write": "self.l2_transfer_engine.device_to_host_stream.wait_stream(\n            self.write_fence_stream)",
}
SCHEDULER = """
class Scheduler:
    def __init__(self):
        controller.load_fence_stream = self.forward_stream
        controller.write_fence_stream = self.forward_stream
    def _apply_war_barrier(self):
        self.schedule_stream.{wait}
"""


@pytest.fixture
def release(tmp_path):
    def make(load=FENCES["load"], write=FENCES["write"], wait="wait_event(event)"):
        managers = tmp_path / "sglang" / "srt" / "managers"
        managers.mkdir(parents=True)
        (managers / "cache_controller.py").write_text(CONTROLLER.format(load=load, write=write))
        (managers / "scheduler.py").write_text(SCHEDULER.format(wait=wait))
        (tmp_path / "sglang-0.5.23.dist-info").mkdir()
        return tmp_path / "sglang"

    return make


def verdicts(source):
    return {audited.path.path: audited.verdict for audited in audit(source)}


def test_a_release_with_both_fences_is_ordered(release):
    source = release()
    found = verdicts(source)
    assert found["load-back"] is found["write-back"] is Verdict.ORDERED
    assert found["retraction, backup"] is Verdict.ABSENT
    (load,) = (audited for audited in audit(source) if audited.path.path == "load-back")
    assert load.where == (
        "managers/cache_controller.py:3",
        "managers/cache_controller.py:4",
        "managers/scheduler.py:4",
    )


@pytest.mark.parametrize(("missing", "path"), [("load", "load-back"), ("write", "write-back")])
def test_one_missing_line_is_a_race_and_the_line_is_named(release, capsys, missing, path):
    source = release(**{missing: "pass"})
    found = verdicts(source)
    assert found[path] is Verdict.RACE
    assert [verdict for verdict in found.values() if verdict is Verdict.RACE] == [Verdict.RACE]
    assert main(["audit-sglang", str(source.parent)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("SGLang 0.5.23; the schedule stream waits for the read-done event")
    assert f"wait_stream(self.{missing}_fence_stream)" in text


@pytest.mark.parametrize(("missing", "path"), [("load", "load-back"), ("write", "write-back")])
def test_the_line_names_only_what_the_release_has_there(release, missing, path):
    """Where the scheduler hands its forward stream to no controller, the line is one of the scheduler's own."""
    source = release(**{missing: "pass"})
    scheduler = source / "srt" / "managers" / "scheduler.py"
    scheduler.write_text(scheduler.read_text().replace(f"{missing}_fence_stream = ", "other = "))
    (race,) = (audited for audited in audit(source) if audited.verdict is Verdict.RACE)
    assert (race.path.path, race.patch) == (path, COARSE)


@pytest.mark.parametrize(
    ("wait", "verdict"),
    [
        ("wait_stream(self.forward_stream)", Verdict.ORDERED),
        ("wait_event(event)", Verdict.RACE),
        ("query()", Verdict.RACE),
    ],
)
def test_a_load_behind_a_barrier_for_whole_rounds_needs_no_fence(release, wait, verdict):
    """As in 0.5.13. A write-back is launched after the next round, which the barrier has not met yet."""
    found = {one.path.path: one for one in audit(release(load="pass", write="pass", wait=wait))}
    assert found["load-back"].verdict is verdict
    assert found["write-back"].verdict is Verdict.RACE
    assert ("the whole round in flight" in found["load-back"].path.edge) is (verdict is Verdict.ORDERED)


OFFLOAD = """
class {owner}:
    def offload(self, transfers):
        ready_event.record()
    def start_layer_wise_loading(self):
        ready_event.record()
"""


@pytest.mark.parametrize("name", ["Mooncake", "UMBP"])
@pytest.mark.parametrize("handed", [True, False])
def test_a_linkers_lines_name_the_forward_stream_only_where_it_has_one(release, name, handed):
    source = release()
    cache = source / "srt" / "mem_cache"
    file = {
        "Mooncake": cache / "storage" / "mooncake_store" / "mooncake_direct_linker.py",
        "UMBP": cache / "storage" / "umbp" / "umbp_direct_linker.py",
    }[name]
    base = cache / "unified_cache" / "unified_cache_linker.py"
    for place in (file, base):
        place.parent.mkdir(parents=True)
    file.write_text(OFFLOAD.format(owner=f"{name}DirectLinker"))
    line = "self.forward_stream = stream" if handed else "pass"
    base.write_text(f"class UnifiedCacheLinker:\n    def __init__(self):\n        {line}\n")
    races = {one.path.path: one.patch for one in audit(source) if one.verdict is Verdict.RACE}
    assert races == {
        f"{name}'s linker, offload": "kv_written.record(self.forward_stream)" if handed else COARSE,
        f"{name}'s linker, load": "device_module.current_stream().wait_stream(self.forward_stream)"
        if handed
        else COARSE,
    }


@pytest.mark.parametrize(
    ("wait", "words"),
    [
        ("wait_event(event)", "the read-done event where a round publishes one"),
        ("wait_stream(self.forward_stream)", "the whole round"),
        ("query()", "nothing"),
    ],
)
def test_the_barrier_is_read(release, wait, words):
    assert barrier(release(wait=wait)).startswith(words)


def test_json_and_a_folder_without_sglang(release, capsys, tmp_path):
    assert main(["audit-sglang", "--json", str(release().parent)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["verdict"] == "ordered"
    (tmp_path / "empty").mkdir()
    assert main(["audit-sglang", str(tmp_path / "empty")]) == 2
    assert "no SGLang release; expected a folder that holds sglang/srt" in capsys.readouterr().err
