"""Runs the demo where the named packages cannot be imported: ``without_packages.py GPU_CHECK OUT PACKAGE...``

GPU_CHECK, the script of ``make gpu-check``, is imported as well; it is written for machines that lack them. OUT gets
the modes as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

MODES = ("none", "stream")
SIZES = {"device": "virtual", "requests": 30, "device_pages": 24}


class Absent:
    """Finds nothing for ``packages``, whether they are installed or not."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.split(".")[0] in self._packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def run_demo() -> list[dict[str, object]]:
    """JSON entries of two policies on the virtual device, where every run is the same."""
    from hicache_obs.cli.demo import build_options
    from hicache_obs.cli.demo_run import DemoRun

    run = DemoRun(build_options(**SIZES), progress=lambda *_: None)  # type: ignore[arg-type] # the values of each flag
    reference = run.reference()
    return [run.mode(fence, reference).as_json() for fence in MODES]


def main(check: str, out: str, *packages: str) -> None:
    sys.meta_path.insert(0, Absent(packages))
    modes = run_demo()
    spec = importlib.util.spec_from_file_location("gpu_check", check)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    missing = [name for name in packages if name in sys.modules]
    assert not missing, f"{missing} were imported before they could be hidden"
    Path(out).write_text(json.dumps(modes))


if __name__ == "__main__":
    main(*sys.argv[1:])
