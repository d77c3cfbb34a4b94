"""``accepted.toml``: what is taken, what is refused with which words, and what happens when the day has passed."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from hicache_obs.errors import ConfigError
from hicache_obs.exporters.accepted import MAX_BYTES, Accepted, read_accepted

ONE = '[HC-3f9a1b2c]\nreason = "fixed in the next image"\nexpires = 2027-03-31\n'


def read(folder: Path, text: str | bytes, day: str = "2027-03-31") -> Accepted:
    path = folder / "accepted.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_accepted(path, today=lambda: datetime.date.fromisoformat(day))


def test_it_holds_to_the_end_of_its_last_day_and_then_says_so(tmp_path: Path) -> None:
    last = read(tmp_path, ONE)
    assert last.covers("HC-3f9a1b2c")
    assert not last.covers("HC-00000000")
    assert last.expired() == []
    acceptance = last.get("HC-3f9a1b2c")
    assert acceptance is not None
    assert acceptance.reason == "fixed in the next image"

    after = read(tmp_path, ONE, "2027-04-01")
    assert not after.covers("HC-3f9a1b2c")
    assert after.expired() == ["HC-3f9a1b2c: its acceptance expired on 2027-03-31; it counts again"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[HC-3f9a1b2c]\nexpires = 2027-03-31", "HC-3f9a1b2c has no 'reason'"),
        ('[HC-3f9a1b2c]\nreason = "x"', "HC-3f9a1b2c has no 'expires'"),
        (ONE + "untill = 2027-03-31", "HC-3f9a1b2c has an unknown key 'untill'"),
        (ONE.replace("HC-3f9a1b2c", "HC-3F9A"), "'HC-3F9A' is not a fingerprint"),
        ('"HC-3f9a1b2c" = "ok"', "HC-3f9a1b2c is not a table"),
        (ONE.replace("fixed in the next image", " "), "reason is ' '"),
        (ONE.replace("2027-03-31", '"2027-03-31"'), "expires is '2027-03-31'; expected a date without quotes"),
        (ONE.replace("2027-03-31", "2027-03-31T10:00:00"), "expected a date without quotes"),
        (ONE + ONE, "not TOML"),
        (b"\xff\xfe", "not TOML"),
        (b"#" * (MAX_BYTES + 1), "larger than"),
    ],
)
def test_what_is_malformed_is_refused_with_one_sentence(tmp_path: Path, text: str | bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"accepted\.toml") as caught:
        read(tmp_path, text)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value).replace("\n[", "[")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_accepted(tmp_path / "absent.toml")
