"""Verdicts on the real HiCache, newest release: each barrier, with and without each fence, and every unfenced path."""

from __future__ import annotations

import pytest

from hicache_obs.records import ALL_LAYERS, IoBegin, IoEnd, IoKind, ThreadPost, ThreadRecv

MATRIX = [
    f"{controller}+{barrier}+writefence{fence}{streams}"
    for controller in ("base", "hybrid")
    for barrier in ("coarse", "readdone")
    for fence in ("", "+loadfence")
    for streams in ("", "+deferred")
]
PATHS = [
    "base+readdone+tree+writefence+deferred",
    "base+readdone+tree+writefence+loadfence+deferred",
    "base+coarse+tree+writefence+deferred",
    "base+readdone+writeback+deferred",
    "base+readdone+writeback+writefence+deferred",
    "base+coarse+writeback+deferred",
    "base+readdone+overlap_off+deferred",
    "base+readdone+direct_backup+deferred",
    "base+readdone+direct_backup+fenced+deferred",
    "base+readdone+direct_restore+deferred",
    "base+readdone+direct_restore+fenced+deferred",
    "base+readdone+retraction+deferred",
    "base+readdone+retraction+fenced+deferred",
    "base+readdone+offload+deferred",
    "base+readdone+storage",
    *(f"base+readdone+drafts{graph}{fence}+deferred" for graph in ("", "+onegraph") for fence in ("", "+fenced")),
    *(
        f"base+{how}"
        for kind in ("linker", "linker+umbp", "linker+foreign")
        for how in (f"readdone+{kind}", f"readdone+{kind}+fenced", f"readdone+{kind}+fenced+blind", f"coarse+{kind}")
    ),
]


@pytest.fixture(scope="module")
def found(outcomes):
    return outcomes([*MATRIX, *PATHS])


@pytest.mark.parametrize("scenario", MATRIX)
def test_the_load_fence_or_the_coarse_barrier_decides(found, scenario):
    outcome = found[scenario]
    racy = "readdone" in scenario and "loadfence" not in scenario
    assert outcome.checked > 0
    assert outcome.told["errors"] == {}
    assert outcome.told["calls"] > 40
    assert outcome.hazards == ({"waw_forward_restore"} if racy else set())
    if "deferred" in scenario:
        assert outcome.right is not racy, outcome.told["content"]


@pytest.mark.parametrize("scenario", [name for name in MATRIX if "readdone" in name and "loadfence" not in name])
def test_the_missing_edge_is_named(found, scenario):
    for finding in found[scenario].findings:
        assert (finding.earlier.site, finding.later.site) == ("forward", "load-back copy")
        assert (finding.missing_edge.on, finding.missing_edge.waiter) == ("forward", "load-back")
        assert finding.cause.value == "missing_fence"


def test_one_defect_has_one_name_in_both_controllers_and_on_both_devices(found):
    names = {
        finding.fingerprint
        for scenario in MATRIX
        for finding in found[scenario].findings
    }  # fmt: skip
    assert len(names) == 1


def test_coarse_without_a_fence_is_ordered_through_the_schedule_stream(found):
    """The path: forward, schedule stream (barrier), start event, load-back."""
    from hicache_obs.records import EventWait, Purpose, WaitStream

    trace = found["base+coarse+writefence+deferred"].trace
    names = {name: stream for stream, name in trace.names.streams.items()}
    assert any(
        isinstance(record, WaitStream) and (record.waiter, record.on) == (names["schedule"], names["forward"])
        for record in trace
    )
    assert any(
        isinstance(record, EventWait) and record.stream == names["load-back"] and record.purpose is Purpose.START
        for record in trace
    )
    assert not any(
        isinstance(record, WaitStream) and (record.waiter, record.on) == (names["load-back"], names["forward"])
        for record in trace
    )


@pytest.mark.parametrize(
    ("scenario", "hazard"),
    [
        ("base+readdone+tree+writefence+deferred", "waw_forward_restore"),
        ("base+readdone+tree+writefence+loadfence+deferred", None),
        ("base+coarse+tree+writefence+deferred", None),
        ("base+readdone+writeback+deferred", "raw_forward_backup"),
        ("base+readdone+writeback+writefence+deferred", None),
        ("base+coarse+writeback+deferred", None),
        ("base+readdone+overlap_off+deferred", None),
        ("base+readdone+direct_backup+deferred", "raw_forward_backup"),
        ("base+readdone+direct_backup+fenced+deferred", None),
        ("base+readdone+direct_restore+deferred", "waw_forward_restore"),
        ("base+readdone+direct_restore+fenced+deferred", None),
        ("base+readdone+retraction+deferred", "waw_forward_restore"),
        ("base+readdone+retraction+fenced+deferred", None),
        ("base+readdone+offload+deferred", None),
        ("base+readdone+drafts+deferred", "graph"),
        ("base+readdone+drafts+fenced+deferred", None),
        ("base+readdone+drafts+onegraph+deferred", "graph"),
        ("base+readdone+drafts+onegraph+fenced+deferred", None),
    ],
)
def test_every_path_is_judged_and_the_pages_agree(found, scenario, hazard):
    outcome = found[scenario]
    assert outcome.checked > 0
    assert outcome.hazards == (set() if hazard is None else {hazard})
    assert outcome.right is (hazard is None), outcome.told["content"]


def test_a_retraction_is_named_and_its_backup_is_ordered_by_the_processed_result(found):
    sites = {finding.later.site for finding in found["base+readdone+retraction+deferred"].findings}
    assert sites == {"retraction restore copy"}
    names = found["base+readdone+retraction+fenced+deferred"].trace.names.sites.values()
    assert {"retraction backup copy", "retraction restore copy"} <= set(names)


@pytest.mark.parametrize("kind", ["linker", "linker+umbp", "linker+foreign"])
@pytest.mark.parametrize(
    ("scenario", "sites"),
    [
        ("base+readdone+{}", {("forward", "linker load")}),
        ("base+readdone+{}+fenced", set()),
        ("base+coarse+{}", set()),
        ("base+readdone+{}+fenced+blind", {("linker load", "forward")}),
    ],
)
def test_a_linkers_load_waits_for_no_round_in_flight(found, scenario, sites, kind):
    """Its event is recorded on the schedule stream, which the read-done barrier lets run ahead; the offload's are not.

    A forward that does not wait for the layers is the other side of the same pages. A linker that is not SGLang's own
    is seen through the same functions.
    """
    outcome = found[scenario.format(kind)]
    assert outcome.told["errors"] == {}
    assert {(finding.earlier.site, finding.later.site) for finding in outcome.findings} == sites
    assert outcome.hazards <= {"rdma"}
    begun = [(one.kind, one.layers) for one in outcome.trace if isinstance(one, IoBegin)]
    assert begun == [(IoKind.DEVICE_READ, ALL_LAYERS), *((IoKind.RDMA_WRITE, (at, at + 1)) for at in range(3))]
    assert sum(isinstance(one, IoEnd) for one in outcome.trace) == len(begun)
    assert not {"raw_forward_backup", "war_backup_forward"} & set(outcome.told["unobservable"])
    assert outcome.right  # nothing runs late here: torch.cpu's streams do everything at once


def test_a_proven_race_has_a_witness(found, capsys):
    """``hicache-obs replay`` runs both schedules of the finding on the virtual device."""
    from hicache_obs.cli import main

    outcome = found["base+readdone+writefence+deferred"]
    main(["replay", outcome.told["ring"]])
    assert outcome.findings[0].fingerprint in capsys.readouterr().out


def test_storage_threads_hand_over_through_queues(found):
    outcome = found["base+readdone+storage"]
    assert outcome.right
    assert outcome.hazards == set()
    kinds = [record.kind for record in outcome.trace if isinstance(record, IoBegin)]
    assert kinds == [IoKind.STORAGE_WRITE, IoKind.STORAGE_READ]
    assert sum(isinstance(record, IoEnd) for record in outcome.trace) == 2
    posts = [record for record in outcome.trace if isinstance(record, ThreadPost)]
    receives = [record for record in outcome.trace if isinstance(record, ThreadRecv)]
    assert {record.channel for record in receives} <= {record.channel for record in posts}
    assert len({record.thread for record in (*posts, *receives)}) >= 3


def test_a_storage_read_without_the_hand_over_would_race(found):
    """The receives carry the order: without them the prefetch's write of the host pages is unordered."""
    from hicache_obs.analyzer import Analyzer
    from hicache_obs.analyzer.tally import Tally

    trace = found["base+readdone+storage"].trace
    tally = Tally()
    analyzer = Analyzer(tally)
    analyzer.feed(record for record in trace if not isinstance(record, ThreadRecv))
    analyzer.finish()
    assert sum(tally.verdicts.values()) > 0


def test_enforce_adds_nothing_where_the_fences_are(outcomes):
    name = "base+readdone+writefence+loadfence+deferred"
    outcome = outcomes([name], "0.5.23", "enforce")[name]
    assert outcome.told["fences_added"] == {}
    assert outcome.right
