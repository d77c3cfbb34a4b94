"""The Kubernetes manifests that are made from other files here: the alerts and the dashboards (needs PyYAML)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import yaml

HERE: Final = Path(__file__).parent
RULES: Final = HERE / "prometheus" / "hicache-obs-rules.yml"
NAMESPACE: Final = "llm"
HEAD: Final = "# Made by python -m hicache_obs.dashboards.build from {source}; change that instead.\n"


def prometheus_rule() -> str:
    """The PrometheusRule with exactly the groups of the rules file."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    body = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": _metadata("hicache-obs", {}),
        "spec": {"groups": groups},
    }
    return HEAD.format(source="../prometheus/hicache-obs-rules.yml") + _dump(body)


def config_maps(files: dict[str, str]) -> str:
    """One ConfigMap per dashboard, with the label Grafana's sidecar looks for; file name → JSON text."""
    maps = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _metadata(f"hicache-obs-{Path(name).stem}", {"grafana_dashboard": "1"}),
            "data": {f"hicache-obs-{name}": text},
        }
        for name, text in files.items()
    ]
    return HEAD.format(source="../grafana/*.json") + "---\n".join(map(_dump, maps))


def _metadata(name: str, labels: dict[str, str]) -> dict[str, object]:
    return {
        "name": name,
        "namespace": NAMESPACE,
        "labels": {"app.kubernetes.io/name": "hicache-obs", **labels},
    }


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _dump(body: object) -> str:
    return str(yaml.dump(body, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=118))
