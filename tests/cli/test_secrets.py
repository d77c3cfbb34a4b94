"""No output holds what the environment or an address keeps secret."""

import json
from pathlib import Path

import pytest

from hicache_obs.cli import main

SECRET = "hunter2-not-to-be-seen"
RUN = [
    "demo",
    "--runner",
    "pattern",
    "--device",
    "virtual",
    "--requests",
    "30",
    "--device-pages",
    "48",
    "--fence",
    "none",
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets where a user of ours keeps them."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer {SECRET}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)


def holds(folder: Path, captured: str) -> list[str]:
    """Where the secret is: files below ``folder`` by name, or what was printed."""
    found = [str(path) for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    return found + ["printed"] * (SECRET in captured)


def test_the_check_sees_a_secret(tmp_path: Path) -> None:
    """The control: one in a file, and one that was printed."""
    (tmp_path / "file").write_text(f"x{SECRET}x")
    assert holds(tmp_path, SECRET) == [str(tmp_path / "file"), "printed"]


def test_neither_journal_nor_report_nor_events(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run with every output it has, the report and the conversions of its journal, and what doctor prints."""
    outputs = [f"--{name}={tmp_path / name}" for name in ("journal", "events", "json")]
    assert main([*RUN, *outputs]) == 0  # its races are expected
    journal = next(path for path in (tmp_path / "journal").rglob("*.arrows")).parent
    assert main(["report", str(journal), "-o", str(tmp_path / "report.html")]) == 1
    for kind in ("json", "pftrace", "parquet"):
        assert main(["convert", str(journal), "-o", str(tmp_path / f"out.{kind}")]) == 0
    assert main(["doctor"]) == 0
    assert json.loads((tmp_path / "json").read_text())
    captured = capfd.readouterr()
    assert "HICACHE_OBS_DIR" in captured.out
    assert holds(tmp_path, captured.out + captured.err) == []


@pytest.mark.parametrize("place", ["s3://key:{}@bucket/journals", "nonsense://user:{}@host/x/*.ring"])
def test_fleet_does_not_repeat_a_password_either(place: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Places are named in the page, the tables and the errors."""
    assert main(["fleet", "--workers", "0", place.format(SECRET)]) == 2
    captured = capfd.readouterr()
    assert "no user or password in the address" in captured.err
    assert SECRET not in captured.out + captured.err


@pytest.mark.parametrize(
    "option",
    ["--storage=s3://key:{}@bucket/pages", "--storage=nonsense://user:{}@host/x", "--otlp=http://me:{}@h:4317"],
)
def test_an_address_with_a_password_is_not_repeated(option: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The error says what to do instead, without the password."""
    assert main([*RUN, option.format(SECRET)]) == 2
    captured = capfd.readouterr()
    assert "no user or password in the address" in captured.err
    assert SECRET not in captured.out + captured.err
