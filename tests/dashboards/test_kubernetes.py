"""The manifests against Kubernetes' and the Prometheus operator's schemas; no cluster is needed, and none is tested."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule

from hicache_obs.config import read_text
from hicache_obs.exporters.endpoint import HEALTHY

FOLDER = importlib.resources.files("hicache_obs.dashboards")
KUBERNETES = "1.33"
FILES = {file.name for file in (FOLDER / "kubernetes").iterdir()}
KUSTOMIZATION = yaml.safe_load((FOLDER / "kubernetes" / "kustomization.yaml").read_text())
OPERATOR = {"PodMonitor": PodMonitor, "PrometheusRule": PrometheusRule}
MANIFESTS: dict[str, Any] = {
    f"{body['kind']}/{body['metadata']['name']}": body
    for file in (FOLDER / "kubernetes").iterdir()
    if file.name not in ("kustomization.yaml", "token")
    for body in yaml.safe_load_all(file.read_text(encoding="utf-8"))
}
SERVER = MANIFESTS["StatefulSet/sglang"]["spec"]["template"]
CONTAINERS = {container["name"]: container for container in SERVER["spec"]["containers"]}


def problems(body: Any) -> str:
    """What the schema of its kind has against a manifest; fields that do not exist included."""
    if body["kind"] in OPERATOR:
        try:
            model = OPERATOR[body["kind"]].model_validate(body)
        except ValueError as error:
            return str(error)
        kept = model.model_dump(by_alias=True, exclude_unset=True, mode="json")
        return "" if kept == body else "unknown field"
    try:
        kubernetes_validate.validate(body, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""


@pytest.mark.parametrize("name", MANIFESTS)
def test_it_fits_its_schema(name: str) -> None:
    assert problems(MANIFESTS[name]) == ""


@pytest.mark.parametrize("name", [name for name in MANIFESTS if not name.startswith("ConfigMap")])
def test_a_misspelt_field_does_not(name: str) -> None:
    body = json.loads(json.dumps(MANIFESTS[name]))
    body["spec"]["selektor"] = {}

    assert problems(body)


def test_all_files_are_applied() -> None:
    assert {*KUSTOMIZATION["resources"], "kustomization.yaml"} == FILES - {"token"}


def test_the_rules_are_those_of_prometheus() -> None:
    rules = yaml.safe_load((FOLDER / "prometheus" / "hicache-obs-rules.yml").read_text())

    assert MANIFESTS["PrometheusRule/hicache-obs"]["spec"] == rules


@pytest.mark.parametrize("board", ["overview", "restore", "detector"])
def test_the_dashboards_are_those_of_grafana(board: str) -> None:
    config_map = MANIFESTS[f"ConfigMap/hicache-obs-{board}"]

    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config_map["data"] == {
        f"hicache-obs-{board}.json": (FOLDER / "grafana" / f"{board}.json").read_text(encoding="utf-8")
    }


def test_server_and_agent_share_the_rings_and_the_user() -> None:
    settings = {
        name: {variable["name"]: variable["value"] for variable in container["env"]}
        for name, container in CONTAINERS.items()
    }
    mounts = [container["volumeMounts"][:1] for container in CONTAINERS.values()]

    assert settings["sglang"]["HICACHE_OBS_AGENT"] == "off"
    assert settings["sglang"]["HICACHE_OBS_DIR"] == settings["hicache-obs-agent"]["HICACHE_OBS_DIR"]
    assert mounts[0] == mounts[1]
    assert settings["hicache-obs-agent"]["HICACHE_OBS_DIR"].startswith(mounts[0][0]["mountPath"] + "/")
    assert SERVER["spec"]["securityContext"]["runAsUser"] == 1000
    assert not any("runAsUser" in container.get("securityContext", {}) for container in CONTAINERS.values())


def test_agent_and_prometheus_share_a_token_that_is_in_no_file(checkout: Path) -> None:
    """Made by kustomize of a file that git ignores; mounted into the agent only; shown by Prometheus."""
    agent, (generated,) = CONTAINERS["hicache-obs-agent"], KUSTOMIZATION["secretGenerator"]
    volumes = {volume["name"]: volume for volume in SERVER["spec"]["volumes"]}
    (mount,) = (one for one in agent["volumeMounts"] if "secret" in volumes[one["name"]])
    (variable,) = (one["value"] for one in agent["env"] if one["name"] == "HICACHE_OBS_TOKEN_FILE")
    own, server = MANIFESTS["PodMonitor/hicache-obs"]["spec"]["podMetricsEndpoints"]

    assert generated == {"name": "hicache-obs-token", "namespace": "llm", "files": ["token"]}
    assert KUSTOMIZATION["generatorOptions"] == {"disableNameSuffixHash": True}
    assert variable == f"{mount['mountPath']}/token"
    assert volumes[mount["name"]]["secret"]["secretName"] == generated["name"]
    assert own["authorization"] == {"type": "Bearer", "credentials": {"name": generated["name"], "key": "token"}}
    assert "authorization" not in server
    assert volumes[mount["name"]]["secret"]["defaultMode"] == 0o440
    assert not any(volumes[one["name"]].get("secret") for one in CONTAINERS["sglang"]["volumeMounts"])
    assert "/dashboards/kubernetes/token" in (checkout / ".gitignore").read_text().splitlines()
    assert read_text("token_file", {"HICACHE_OBS_TOKEN_FILE": variable})[0] == variable


def test_a_broken_agent_is_restarted_and_never_takes_its_server_out_of_service() -> None:
    """The page of the one probe needs no token."""
    agent = CONTAINERS["hicache-obs-agent"]

    assert agent["livenessProbe"]["httpGet"]["path"] == HEALTHY
    assert "readinessProbe" not in agent


def test_ports_and_labels_meet() -> None:
    ports = {port["name"]: port["containerPort"] for one in CONTAINERS.values() for port in one["ports"]}
    monitor = MANIFESTS["PodMonitor/hicache-obs"]["spec"]
    policy = MANIFESTS["NetworkPolicy/hicache-obs"]["spec"]
    agent_rule = next(rule for rule in policy["ingress"] if rule["ports"][0]["port"] == ports["hicache-obs"])

    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} == set(ports)
    for selector in (monitor["selector"], policy["podSelector"]):
        assert selector["matchLabels"].items() <= SERVER["metadata"]["labels"].items()
    assert agent_rule["from"], "the agent's port is not open to all"
    assert {rule["ports"][0]["port"] for rule in policy["ingress"]} == set(ports.values())


@pytest.mark.parametrize("path", ["compose/compose.yml", "provisioning/datasources/hicache-obs.yml"])
def test_what_ci_cannot_run_parses_and_names_files_that_exist(path: str) -> None:
    body = yaml.safe_load((FOLDER / path).read_text())
    mounts = [mount for service in body.get("services", {}).values() for mount in service["volumes"]]

    assert body
    for mount in mounts:
        assert (FOLDER / "compose" / mount.split(":")[0]).exists(), mount
    for source in body.get("datasources", []):
        for destination in source.get("jsonData", {}).get("exemplarTraceIdDestinations", []):
            assert destination["datasourceUid"] in {other["uid"] for other in body["datasources"]}
