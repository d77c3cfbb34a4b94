"""Write the dashboards: ``python -m hicache_obs.dashboards.build`` rewrites ``dashboards/grafana/*.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from hicache_obs.dashboards.overview import OVERVIEW
from hicache_obs.dashboards.panels import Json, dashboard

FOLDER: Final = Path(__file__).parent / "grafana"


def dashboards() -> dict[str, Json]:
    """File name → dashboard, of every board."""
    return {"overview.json": dashboard(OVERVIEW)}


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
