"""The engine of docs/integrations.md: the page's own code, run and judged."""

from __future__ import annotations

import re

import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.tally import Tally
from hicache_obs.readers import open_trace


@pytest.fixture(scope="module")
def page(checkout):
    text = (checkout / "docs" / "integrations.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    return code[1]


def test_it_is_short(page):
    assert len(page.splitlines()) <= 150


@pytest.mark.parametrize(("fence", "hazards"), [("none", {"waw_forward_restore"}), ("stream", set())])
def test_the_second_engine_is_judged_like_the_first(page, tmp_path, monkeypatch, fence, hazards):
    monkeypatch.setenv("HICACHE_OBS_DIR", str(tmp_path / "rings"))
    names = {"__name__": "page"}
    exec(compile(page, "docs/integrations.md", "exec"), names)
    trace = open_trace(names["record"](fence))
    tally = Tally()
    analyzer = Analyzer(tally)
    analyzer.feed(trace)
    analyzer.finish()
    found = {defect.example.hazard.value for defect in tally.defects.values()}
    assert hazards <= found if hazards else not found
    assert analyzer.totals.pairs_checked > 0
    assert trace.names.engine == "our controller 0.1"
