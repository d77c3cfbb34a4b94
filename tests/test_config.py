"""Settings come from one table, which ``hicache-obs doctor`` prints with their source."""

from __future__ import annotations

import pytest

from hicache_obs.cli import main
from hicache_obs.config import SETTINGS, Setting, TextSetting, read_any, read_setting, read_text
from hicache_obs.errors import ConfigError

NUMBERS = [setting for setting in SETTINGS if isinstance(setting, Setting)]
TEXTS = [setting for setting in SETTINGS if isinstance(setting, TextSetting)]


def test_names_and_variables_are_unique():
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    assert len({setting.variable for setting in SETTINGS}) == len(SETTINGS)
    assert all(setting.variable.startswith("HICACHE_OBS") for setting in SETTINGS)


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.name)
def test_a_number_is_read_inside_its_limits(setting):
    assert read_setting(setting.name, {}) == (setting.default, "default")
    assert setting.low <= setting.default <= setting.high
    for value in (setting.low, setting.high):
        assert read_setting(setting.name, {setting.variable: str(value)}) == (value, setting.variable)
    for text in (str(setting.low - 1), str(setting.high + 1), "", "x", "1.5"):
        with pytest.raises(ConfigError, match=f"^{setting.variable}: .*; expected {setting.allowed}$"):
            read_setting(setting.name, {setting.variable: text})


@pytest.mark.parametrize("setting", TEXTS, ids=lambda setting: setting.name)
def test_a_text_is_read(setting):
    assert read_text(setting.name, {}) == (setting.default({}), "default")
    text = setting.choices[-1] if setting.choices else "x y"
    assert read_any(setting, {setting.variable: text}) == (text, setting.variable)
    with pytest.raises(ConfigError, match=f"^{setting.variable}: ''; expected {setting.allowed}$"):
        read_text(setting.name, {setting.variable: ""})


def test_a_choice_is_one_of_its_words():
    with pytest.raises(ConfigError, match=r"^HICACHE_OBS_FINISHED: 'Move'; expected move or keep$"):
        read_text("finished", {"HICACHE_OBS_FINISHED": "Move"})


def test_doctor_shows_each_setting_with_its_source(monkeypatch, capsys):
    for setting in SETTINGS:
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.setenv("HICACHE_OBS_DIR", "/x/y")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  HICACHE_OBS_DIR = /x/y (from the environment; a directory)" in lines
    assert "  HICACHE_OBS_JOURNAL = none (default; a directory)" in lines
    assert "  HICACHE_OBS_PORT = 9464 (default; an integer from 0 to 65535)" in lines
    assert "  HICACHE_OBS_FINISHED = move (default; move or keep)" in lines
    assert all(any(line.startswith(f"  {setting.variable} = ") for line in lines) for setting in SETTINGS)


def test_doctor_shows_all_that_is_wrong_with_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("HICACHE_OBS", "yes")
    monkeypatch.setenv("HICACHE_OBS_PORT", "http")
    monkeypatch.setenv("HICACHE_OBS_JOURNALS", "/x")
    assert main(["doctor"]) == 2
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert "  HICACHE_OBS: 'yes'; expected off or observe or enforce" in lines
    assert "  HICACHE_OBS_PORT: 'http'; expected an integer from 0 to 65535" in lines
    assert (
        "  HICACHE_OBS_JOURNALS is set in the environment and is no setting; did you mean HICACHE_OBS_JOURNAL?" in lines
    )
    assert "Blind spots" in lines


@pytest.mark.parametrize(("mode", "told"), [(0o777, True), (0o700, False)])
def test_doctor_says_that_rings_cannot_be_written_where_they_are_to_be(monkeypatch, capsys, tmp_path, mode, told):
    folder = tmp_path / "rings"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("HICACHE_OBS", "observe")
    monkeypatch.setenv("HICACHE_OBS_DIR", str(folder))
    main(["doctor"])
    text = " ".join(capsys.readouterr().out.split())
    assert (f"nothing will be recorded: ring directory {folder}: others may write to it" in text) is told
