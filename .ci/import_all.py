"""Import every module of the installed package, and show that it is the installed one: import_all.py"""

import importlib
import pkgutil
import sys
from pathlib import Path

import hicache_obs

# What only tests of other projects need (hicache_obs.testing is for those), and what only builds the dashboards.
OPTIONAL = {
    "hicache_obs.testing": {"hypothesis", "pytest"},
    "hicache_obs.dashboards": {"grafana_foundation_sdk", "yaml"},
}


def main() -> int:
    home = Path(hicache_obs.__file__).parent
    if not home.is_relative_to(sys.prefix):
        print(f"{home} is not inside {sys.prefix}: the tree was imported, not the wheel")
        return 1
    names = [m.name for m in pkgutil.walk_packages(hicache_obs.__path__, "hicache_obs.")]
    for name in names:
        if name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL.get(name.rpartition(".")[0], set()):
                raise
    print(f"imported {len(names)} modules from the wheel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
