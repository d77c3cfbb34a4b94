"""Write what is made by code: ``python -m hicache_obs.dashboards.build`` rewrites the dashboards and two manifests.

Needs the extra ``dev``. Files: ``grafana/*.json``, ``kubernetes/prometheusrule.yaml``, ``kubernetes/dashboards.yaml``.
"""

from __future__ import annotations

import json
from typing import Final

from hicache_obs.dashboards.detector import DETECTOR
from hicache_obs.dashboards.grafana import Json, dashboard_json
from hicache_obs.dashboards.manifests import HERE, config_maps, prometheus_rule
from hicache_obs.dashboards.overview import OVERVIEW
from hicache_obs.dashboards.restore import RESTORE

BOARDS: Final = {"overview.json": OVERVIEW, "restore.json": RESTORE, "detector.json": DETECTOR}


def dashboards() -> dict[str, Json]:
    """File name → dashboard, of every board."""
    return {name: dashboard_json(board) for name, board in BOARDS.items()}


def text(board: Json) -> str:
    """The file text of one dashboard."""
    return json.dumps(board, indent=2, ensure_ascii=False) + "\n"


def files() -> dict[str, str]:
    """Path below this package → text, of every file that is made by code."""
    boards = {name: text(board) for name, board in dashboards().items()}
    return {
        **{f"grafana/{name}": board for name, board in boards.items()},
        "kubernetes/prometheusrule.yaml": prometheus_rule(),
        "kubernetes/dashboards.yaml": config_maps(boards),
    }


def main() -> None:
    """Write every file and print its path."""
    for name, content in files().items():
        (HERE / name).write_text(content, encoding="utf-8")
        print(HERE / name)


if __name__ == "__main__":
    main()
