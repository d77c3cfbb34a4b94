"""Print what the installed hicache-obs and the given extras require, torch left out: one requirement a line."""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement


def main(*extras: str) -> int:
    for text in requires("hicache-obs") or ():
        requirement = Requirement(text)
        wanted = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        )
        if wanted and requirement.name != "torch":
            requirement.marker = None
            print(requirement)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
