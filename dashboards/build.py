"""Write the dashboards: ``python -m hicache_obs.dashboards.build`` rewrites ``dashboards/grafana/*.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from hicache_obs.dashboards.detector import DETECTOR
from hicache_obs.dashboards.grafana import Json, dashboard_json
from hicache_obs.dashboards.overview import OVERVIEW
from hicache_obs.dashboards.restore import RESTORE

FOLDER: Final = Path(__file__).parent / "grafana"
BOARDS: Final = {"overview.json": OVERVIEW, "restore.json": RESTORE, "detector.json": DETECTOR}


def dashboards() -> dict[str, Json]:
    """File name → dashboard, of every board."""
    return {name: dashboard_json(board) for name, board in BOARDS.items()}


def text(board: Json) -> str:
    """The file text of one dashboard."""
    return json.dumps(board, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write every file and print its path."""
    FOLDER.mkdir(exist_ok=True)
    for name, board in dashboards().items():
        (FOLDER / name).write_text(text(board), encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main()
