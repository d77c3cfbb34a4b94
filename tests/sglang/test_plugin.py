"""The plugin's entry point: what is wrong with a setting is said when the server starts, in one line."""

from __future__ import annotations

import pytest

from hicache_obs.sglang import install, plugin


@pytest.fixture
def observing(monkeypatch, tmp_path):
    monkeypatch.setenv("HICACHE_OBS", "observe")
    monkeypatch.setenv("HICACHE_OBS_PROCESSES", "all")
    monkeypatch.setenv("HICACHE_OBS_DIR", str(tmp_path / "rings"))
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(install, "sglang_version", lambda: 1 // 0)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("HICACHE_OBS", "observ", "HICACHE_OBS: 'observ'; expected off or observe or enforce"),
        ("HICACHE_OBS_LINK_GB_S", "-3", "HICACHE_OBS_LINK_GB_S: -3; expected an integer from 1 to 65536"),
        ("HICACHE_OBS_READ_IDS", "lots", "HICACHE_OBS_READ_IDS: 'lots'; expected an integer"),
        ("HICACHE_OBS_RING_SLOTS", "1000", "HICACHE_OBS_RING_SLOTS: 1000; expected a power of two"),
        ("HICACHE_OBS_AGENT", "maybe", "HICACHE_OBS_AGENT: 'maybe'; expected on or off"),
        ("HICACHE_OBS_DIR", "file", "ring directory file: is not a directory"),
    ],
)
def test_a_wrong_value_is_told_at_the_start_without_a_traceback(observing, monkeypatch, caplog, variable, value, words):
    monkeypatch.setenv(variable, value)
    plugin.register()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"hicache-obs: not installed: {words}")
    assert record.exc_info is None


def test_anything_else_comes_with_its_traceback(observing, caplog):
    plugin.register()
    (record,) = caplog.records
    assert record.getMessage() == "hicache-obs: not installed: integer division or modulo by zero"
    assert record.exc_info[0] is ZeroDivisionError


def test_switched_off_it_does_nothing(observing, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("HICACHE_OBS", "off")
    plugin.register()
    assert caplog.records == []
    assert not (tmp_path / "rings").exists()
