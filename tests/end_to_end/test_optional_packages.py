"""Machines with a GPU and nothing else: the engine, the recorder and the analyzer need few packages."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OPTIONAL = ["nvtx", "msgspec", "jsonschema", "opentelemetry"]
DEADLINE_S = 120


@pytest.mark.slow
def test_demo_and_gpu_check_work_without_optional_packages(tmp_path: Path) -> None:
    """And give the same numbers: on the virtual device every run is the same."""
    script, out = HERE / "without_packages.py", tmp_path / "modes.json"

    ended = subprocess.run(
        [sys.executable, script, HERE.parent / "gpu" / "check.py", out, *OPTIONAL],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    spec = importlib.util.spec_from_file_location("without_packages", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with_all: list[dict[str, object]] = module.run_demo()
    assert json.loads(out.read_text()) == with_all
    assert [mode["violations"] != 0 for mode in with_all] == [True, False]
