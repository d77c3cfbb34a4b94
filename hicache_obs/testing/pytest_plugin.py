"""The pytest plugin: fixture ``kv_streams``, which fails a test whose stream work races (docs/testing.md).

pytest loads this module in every run, so it imports nothing but pytest; the rest is loaded by the first test that uses
the fixture. The verdict is part of the test's call, so that a race is a failure of the test and not an error beside it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from hicache_obs.findings import Finding
    from hicache_obs.testing.stream_watch import StreamWatch, Watched

SETTINGS: Final = {
    "device": ("virtual", "device of the kv_streams fixture: virtual, threads, cuda, or auto"),
    "schedule": ("adversarial", "schedule of the virtual device"),
    "seed": ("0", "seed of the virtual device's random schedule"),
    "unchecked": ("fail", "what a test in which nothing was checked does: fail, warn or pass"),
}
"""Name, default and purpose; as ``--hicache-obs-NAME`` and as ``hicache_obs_NAME`` in the configuration file."""
UNCHECKED: Final = ("fail", "warn", "pass")
SHOWN: Final = 3
"""Races explained in full per test; the rest are counted."""
_STREAMS_KEYS: Final = ("device", "schedule", "seed", "allow_unchecked")
_WATCH: Final = pytest.StashKey["StreamWatch"]()


class UncheckedWarning(UserWarning):
    """A test used ``kv_streams``, and no access was compared with an earlier one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Command line and configuration file."""
    group = parser.getgroup("hicache-obs", "stream races in KV caches")
    for name, (default, purpose) in SETTINGS.items():
        group.addoption(f"--hicache-obs-{name}", metavar=name.upper(), default=None, help=f"{purpose} ({default})")
        parser.addini(f"hicache_obs_{name}", purpose, default=default)
    group.addoption(
        "--hicache-obs-write",
        metavar="DIR",
        default=None,
        help="write each race that was found as a test of its own into this directory",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Markers; refuses settings that are not allowed before any test runs."""
    config.addinivalue_line(
        "markers",
        "hicache_race(*hazards): the kv_streams fixture must find exactly these hazards, such as 'waw_forward_restore'",
    )
    config.addinivalue_line(
        "markers",
        "hicache_streams(device=, schedule=, seed=, allow_unchecked=): how the kv_streams fixture runs this test",
    )
    if _setting(config, "unchecked") not in UNCHECKED:
        raise pytest.UsageError(
            f"hicache_obs_unchecked {_setting(config, 'unchecked')!r}: must be one of {', '.join(UNCHECKED)}"
        )
    if not re.fullmatch(r"-?\d{1,18}", _setting(config, "seed")):
        raise pytest.UsageError(f"hicache_obs_seed {_setting(config, 'seed')!r}: must be an integer")


@pytest.fixture
def kv_streams(request: pytest.FixtureRequest) -> Generator[StreamWatch, None, None]:
    """A device whose streams are recorded; the test fails if what ran on them races.

    ``kv_streams.device`` is a device of ``hicache_obs.streams`` to run the code under test on, on CUDA over torch's own
    streams; ``kv_streams.recorder`` takes what a device cannot see. One test, one device. Not thread-safe itself, but
    any host thread may use the device; all must be done when the test returns.
    """
    from hicache_obs.errors import ConfigError
    from hicache_obs.testing.stream_watch import StreamWatch

    how = _how(request.node)
    try:
        watch = StreamWatch(how["device"], schedule=how["schedule"], seed=how["seed"], source=request.node.nodeid)
    except ConfigError as error:
        raise pytest.fail.Exception(f"kv_streams: {error}", pytrace=False) from None
    watch.allow_unchecked = how["allow_unchecked"]
    request.node.stash[_WATCH] = watch
    yield watch
    watch.device.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Judge what the test did on its streams; of a test that failed by itself, say so beside its own failure."""
    expected = _expected(item)
    watch = item.stash.get(_WATCH, None)
    if expected and watch is None:
        pytest.fail("the marker hicache_race needs the fixture kv_streams", pytrace=False)
    try:
        result = yield
    except (Exception, pytest.fail.Exception):
        if watch is not None:
            item.add_report_section("call", "hicache-obs", _beside(item, watch, expected))
        raise
    if watch is not None:
        said = _said(item, watch, expected)
        if said:
            pytest.fail(said, pytrace=False)
    return result


def _setting(config: pytest.Config, name: str) -> str:
    """The command line's value, else the configuration file's, else the default."""
    chosen = config.getoption(f"--hicache-obs-{name}")
    return str(config.getini(f"hicache_obs_{name}") if chosen is None else chosen)


def _how(item: pytest.Item) -> dict[str, Any]:
    """Device, schedule, seed and strictness of one test: its marker's, else the run's."""
    config = item.config
    how: dict[str, Any] = {name: _setting(config, name) for name in ("device", "schedule")}
    how |= {"seed": int(_setting(config, "seed")), "allow_unchecked": _setting(config, "unchecked") == "pass"}
    for marker in reversed(list(item.iter_markers("hicache_streams"))):
        wrong = [*map(repr, marker.args), *(key for key in marker.kwargs if key not in _STREAMS_KEYS)]
        if wrong:
            pytest.fail(f"marker hicache_streams: {wrong[0]}; takes {', '.join(_STREAMS_KEYS)}, by name", pytrace=False)
        how |= marker.kwargs
    return how


def _expected(item: pytest.Item) -> frozenset[str]:
    """Hazards that the test's markers name."""
    names = frozenset(name for marker in item.iter_markers("hicache_race") for name in marker.args)
    markers = list(item.iter_markers("hicache_race"))
    if not markers:
        return names
    from hicache_obs.findings import Hazard

    known = [hazard.value for hazard in Hazard]
    wrong = sorted(map(repr, names - set(known)))
    if wrong or not all(marker.args for marker in markers):
        what = wrong[0] if wrong else "no hazard"
        pytest.fail(f"marker hicache_race: {what}; must be one of {', '.join(known)}", pytrace=False)
    return names


def _beside(item: pytest.Item, watch: StreamWatch, expected: frozenset[str]) -> str:
    """As ``_said``, of a test that failed: its own failure must not be hidden by one of its device."""
    from hicache_obs.errors import StreamError

    try:
        return _said(item, watch, expected) or "no race was found"
    except StreamError as error:
        return f"the stream work cannot be judged: {error}"


def _said(item: pytest.Item, watch: StreamWatch, expected: frozenset[str]) -> str:
    """What is wrong with the test's stream work; empty if nothing is."""
    watched = watch.finish()
    item.user_properties.append(("hicache_obs_pairs_checked", watched.pairs_checked))
    found = {hazard.value for hazard in watched.hazards}
    absent, surprising = sorted(expected - found), found - expected
    if absent:
        return f"expected {', '.join(absent)}, and found {', '.join(sorted(found)) or 'no race'}{_checked(watched)}"
    if surprising:
        return _races(item, watch, watched, [found for found in watched.findings if found.hazard.value in surprising])
    if watched.unknown:
        return f"cannot tell whether {len(watched.unknown)} pairs of accesses are ordered: records were lost"
    if not watched.pairs_checked and not watch.allow_unchecked:
        text = f"nothing was checked{_checked(watched)}; a test that means this sets kv_streams.allow_unchecked"
        if _setting(item.config, "unchecked") == "fail":
            return text
        item.warn(UncheckedWarning(text))
    return ""


def _checked(watched: Watched) -> str:
    work = sum(bool(getattr(record, "accesses", ())) for record in watched.trace)
    return f" ({work} operations with accesses recorded, {watched.pairs_checked} page pairs checked)"


def _races(item: pytest.Item, watch: StreamWatch, watched: Watched, findings: list[Finding]) -> str:
    """Every race in words, how to replay it, and where it was written to."""
    from hicache_obs.analyzer import explain

    radii = dict(zip(map(id, watched.findings), watched.radii, strict=True))
    number = len(findings)
    noun = "finding" if any(finding.misuse for finding in findings) else "stream race"
    lines = [f"{number} {noun}{'s' if number > 1 else ''} on device {watch.device.name!r}{_checked(watched)}"]
    for finding in findings[:SHOWN]:
        radius = None if finding.misuse else radii[id(finding)]
        lines += ["", explain(finding, radius), *_kept(item, watch, watched, finding)]
    if number > SHOWN:
        lines += ["", f"... and {number - SHOWN} more"]
    return "\n".join(lines)


def _kept(item: pytest.Item, watch: StreamWatch, watched: Watched, finding: Finding) -> list[str]:
    """Write the race as a scenario, and as a test if asked for; lines that say where and how to run it."""
    from hicache_obs.errors import InputError
    from hicache_obs.findings import Verdict
    from hicache_obs.readers.scenario import parse_scenario
    from hicache_obs.testing.gated import unfit
    from hicache_obs.testing.regression import SOURCE, find_pair, keep, write_test
    from hicache_obs.testing.scenario_writer import render
    from hicache_obs.whole_file import replace_file

    if finding.misuse or finding.verdict is Verdict.CONTRADICTION:
        return []  # an edge orders the two: there is no schedule to show
    try:
        kept = keep(watched.trace, finding)
        text = render(kept.scenario)
        folder = _scratch(item)
        path = folder / f"{finding.fingerprint}-{finding.earlier.op}-{finding.later.op}.json"
        replace_file(path, text.encode())
        lines = [f"  replay   hicache-obs replay {path} --between {kept.earlier} {kept.later}"]
        target = item.config.getoption("--hicache-obs-write")
        if target is not None:
            trace = parse_scenario(text.encode(), source=SOURCE)
            gated = not unfit(trace, *find_pair(trace, kept.earlier, kept.later))
            device = watch.device.name if watch.device.name == "cuda" else "threads"
            written = write_test(
                item.config.invocation_params.dir / target,
                kept,
                finding,
                origin=item.nodeid,
                device=device if gated else None,
            )
            lines.append(f"  written  {written}")
    except InputError as error:
        return [f"  replay   not possible: {error}"]
    return lines


def _scratch(item: pytest.Item) -> Path:
    """A folder of this test's own among pytest's temporary ones; each xdist worker has its own above it."""
    factory: pytest.TempPathFactory = item.config._tmp_path_factory  # type: ignore[attr-defined]
    name = hashlib.sha256(item.nodeid.encode()).hexdigest()[:8]
    folder = factory.getbasetemp() / "hicache-obs" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
