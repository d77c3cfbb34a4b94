"""``hicache-obs dashboards``: the committed files, with the addresses of a site."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache_obs.cli import main
from hicache_obs.dashboards.addresses import FOLDERS, PLACEHOLDER

FOLDER = importlib.resources.files("hicache_obs.dashboards")
WIKI, GRAFANA = "https://wiki.corp/hicache", "http://grafana.corp:3000/team-a"


def written(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """All files, with both addresses."""
    assert main(["dashboards", "--out", str(tmp_path / "site"), "--runbooks", WIKI + "/", "--grafana", GRAFANA]) == 0
    return tmp_path / "site"


def alerts(text: str) -> list[dict[str, Any]]:
    body = yaml.safe_load(text)
    groups = body.get("groups") or body["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@pytest.mark.parametrize("name", ["prometheus/hicache-obs-rules.yml", "kubernetes/prometheusrule.yaml"])
def test_every_alert_leads_to_its_runbook_and_board(site: Path, name: str) -> None:
    found = alerts((site / name).read_text())

    assert len(found) == 11
    for alert in found:
        assert alert["annotations"]["runbook_url"] == f"{WIKI}/{alert['alert']}.md"
        assert (site / "runbooks" / f"{alert['alert']}.md").is_file()
        assert alert["annotations"]["dashboard_url"].startswith(f"{GRAFANA}/d/hicache-obs-")


def test_the_boards_lead_to_the_runbooks(site: Path) -> None:
    for path in (site / "grafana").iterdir():
        board = json.loads(path.read_text())
        (variable,) = (one for one in board["templating"]["list"] if one["name"] == "runbooks")
        assert variable["query"] == WIKI


def schemes(folder: Path) -> set[str]:
    """What the boards, also those in the manifest, put before an agent's address."""
    boards = [path.read_text() for path in (folder / "grafana").iterdir()]
    for manifest in yaml.safe_load_all((folder / "kubernetes" / "dashboards.yaml").read_text()):
        boards += manifest["data"].values()
    assert len(boards) == 6
    return {
        variable["query"]
        for board in boards
        for variable in json.loads(board)["templating"]["list"]
        if variable["name"] == "scheme"
    }


def test_the_boards_lead_to_agents_with_a_certificate_by_https(site: Path, tmp_path: Path) -> None:
    assert schemes(site) == {"http"}
    assert main(["dashboards", "--out", str(tmp_path / "tls"), "--runbooks", WIKI, "--grafana", GRAFANA, "--tls"]) == 0
    assert schemes(tmp_path / "tls") == {"https"}
    changed = {name for name, text in written(tmp_path / "tls").items() if text != written(site)[name]}
    assert {name.split("/")[0] for name in changed} == {"grafana", "kubernetes"}


def test_nothing_but_the_addresses_is_changed(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without addresses the files are the committed ones, byte for byte, and a line says what is missing."""
    capsys.readouterr()
    assert main(["dashboards", "--out", str(tmp_path / "plain")]) == 0
    assert "give --runbooks and --grafana" in capsys.readouterr().err
    plain, ours = written(tmp_path / "plain"), written(site)

    assert {name.split("/")[0] for name in plain} == set(FOLDERS)
    assert {name: (FOLDER / name).read_text() for name in plain} == plain
    assert not any(PLACEHOLDER in text for name, text in ours.items())
    assert {
        name: text.replace(WIKI, f"{PLACEHOLDER}/runbooks").replace(GRAFANA, f"{PLACEHOLDER}/grafana")
        for name, text in ours.items()
    } == plain


def test_promtool_accepts_the_rules(site: Path, require_tool: Callable[..., Path]) -> None:
    promtool = require_tool("promtool", install="apt-get install prometheus")
    rules = site / "prometheus" / "hicache-obs-rules.yml"
    command = [promtool, "check", "rules", "--lint=all", "--lint-fatal", rules]

    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    "address", ["wiki/hicache", "https://", "https://a b", "https://a'", "https://a/{{ . }}", "ftp://a"]
)
@pytest.mark.parametrize("option", ["--runbooks", "--grafana"])
def test_what_is_no_address_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, address: str
) -> None:
    assert main(["dashboards", "--out", str(tmp_path / "site"), option, address]) == 2
    assert f"{option} {address!r}: not an address" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_files_that_are_there_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    assert main(["dashboards", "--out", str(tmp_path)]) == 2
    assert main(["dashboards", "--out", str(tmp_path / "mine")]) == 2
    assert main(["dashboards", "--out", str(tmp_path / "mine" / "below")]) == 2
    assert "is there already; expected a new or empty directory" in capsys.readouterr().err
    assert written(tmp_path) == {"mine": "mine"}
