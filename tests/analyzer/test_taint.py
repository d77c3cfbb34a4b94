"""Blast radius: each rule as a pair of histories, and against wrong contents on the virtual device."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache_obs.analyzer import Analyzer, explain, taint
from hicache_obs.cli.check import command
from hicache_obs.controller.cache_controller import SubmittedTransfer
from hicache_obs.controller.engine import Engine, EngineConfig, build_engine
from hicache_obs.controller.scheduler import SchedulerOptions
from hicache_obs.controller.workloads import Request, generate
from hicache_obs.findings import BlastRadius, Finding, Verdict
from hicache_obs.recorder.recorded import RecordedDevice, Recorder
from hicache_obs.records import (
    ALL_LAYERS,
    Access,
    AnyRecord,
    CaptureMode,
    Direction,
    DropReason,
    IoBegin,
    IoKind,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    Record,
    Relocate,
    Space,
    StreamId,
    ThreadId,
    device,
    host,
    page_ids,
)
from hicache_obs.streams import open_device
from hicache_obs.testing import History, RecordingSink

MAIN = ThreadId(0)


def analysed(text: str, *more: Record, then: str = "") -> tuple[Analyzer, list[Finding]]:
    """An analyzer fed with a history, further records, and more of the history."""
    records: list[Record] = [*History(text).records, *more]
    if then:
        records += History(f"{text} {then}").records[-len(then.split()) :]
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    return analyzer, sink.findings


def radius(text: str, *more: Record, then: str = "") -> BlastRadius:
    """Blast radius of the first race of a history."""
    analyzer, findings = analysed(text, *more, then=then)
    return analyzer.blast_radius((findings[0].earlier.op, findings[0].later.op))


def reached(text: str, *more: Record, then: str = "") -> str:
    """The radius in one line: rounds, transfers, device and host pages; in histories a step is its own round."""
    found = radius(text, *more, then=then)
    assert found.complete
    parts = {
        "round": found.rounds,
        "transfer": found.transfers,
        "io": found.ios,
        "device": [page for _, page in found.device_pages],
        "host": [page for _, page in found.host_pages],
    }
    return " ".join(f"{name} {','.join(map(str, ids))}" for name, ids in parts.items() if ids)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # What a race spoils by itself: pages both write, and what a reader made of the pages.
        ("F:w5 L:w5", "device 5"),
        ("F:w5,6 L:w6,7", "device 6"),
        ("F:w5 B:r5W1", "transfer 1 host 1"),
        ("L:R1w5 F:r5w6", "round 1 device 6"),
        ("F:r5w6 L:R1w5", "round 0 device 6"),
        ("B:r5W1 F:w5", "transfer 0 host 1"),
        # A round that reads a spoiled page is spoiled; one that does not is not.
        ("F:w5 L:w5 F<L F:r5w6", "round 3 device 5,6"),
        ("F:w5 L:w5 F<L F:r4w6", "device 5"),
        ("F:w5 L:w5 F<L F:r5w6 F:r6w7 F:r7w8", "round 3,4,5 device 5,6,7,8"),
        ("F:w5 L:w5 F<L F:r5w6 F:r8w7 F:r7w9", "round 3 device 5,6"),
        # Copies: page by page, layer by layer.
        ("F:w5 L:w5 B<L B<F B:r4,5W1,2", "transfer 4 device 5 host 2"),
        ("F:w5 L:w5 B<L B<F B:r4,6W1,2", "device 5"),
        ("F:w5 L:w5 B<L B<F B:r4,5W1", "transfer 4 device 5 host 1"),  # fewer places than pages: all by all
        ("F:w5@2 L:w5@2 B<L B<F B:r5W1@2", "transfer 4 device 5 host 1"),
        ("F:w5@2 L:w5@2 B<L B<F B:r5W1@0-1", "device 5"),
        ("F:w5@0 L:w5 F<L F:r5w6@0", "round 3 device 5,6"),
        ("F:w5@0 L:w5 F<L F:r5w6@1", "device 5"),
        ("F:w5 L:w5 B<L B<F B:r4,5W1W2", "transfer 4 device 5 host 2"),
        ("F:w4 L:w4 B<L B<F B:r4,5W1W2", "transfer 4 device 4 host 1"),
        ("F:w5@2 L:w5@2 B<L B<F B:r5W1@2 L<B L:R1w7 F<L F:r7w8@0", "transfer 4,6 device 5,7 host 1"),
        ("F:w5@2 L:w5@2 B<L B<F B:r5W1@2 L<B L:R1w7@2 F<L F:r7w8@2", "round 8 transfer 4,6 device 5,7,8 host 1"),
        ("F:w5@2 L:w5@2 F<L F:r5w6@2 F:r6w7@0", "round 3,4 device 5,6,7"),  # the next token is wrong at all layers
        ("F:w1023 L:w1023 F<L F:r2000w6", "device 1023"),
        # restore -> forward -> backup -> restore -> forward
        (
            "F:w5 L:R9w5 F<L F:r5w6 B<F B:r6W3 L<B L:R3w7 F<L F:r7w8",
            "round 3,9 transfer 5,7 device 5,6,7,8 host 3",
        ),
        ("F:w5 L:R9w5 F<L F:r5w6 B<F B:r4W3 L<B L:R3w7 F<L F:r7w8", "round 3 device 5,6"),
        # A whole overwrite by a clean copy cleans, at its layers; a round, which writes parts, does not.
        ("F:w5 L:w5 L:R2w5 F<L F:r5w6", "device 5"),
        ("F:w5 L:w5 L:R2w5@0 F<L F:r5w6@0", "device 5"),
        ("F:w5 L:w5 L:R2w5@0 F<L F:r5w6@1", "round 4 device 5,6"),
        ("F:w5 L:w5 F<L F:w5 F:r5w6", "round 4 device 5,6"),
        ("F:w5 B:r5W1 F:w6 B<F B:r6W1 L<B L:R1w7", "transfer 1 host 1"),
        ("F:w5 B:r5W1 L<B L:R1w7", "transfer 1,3 device 7 host 1"),
        ("F:w5 B:r5W1 L<B L:R1w7 L:R2w7 F<L F:r7w8", "transfer 1,3 device 7 host 1"),
        ("B:r5W1 F:w5@0 F:w5@1 L<B L:R1w7@1 F<L F:r7w8@1", "round 6 transfer 0,4 device 7,8 host 1"),
        ("B:r5W1 F:w5@0 F:w5@1 L<B L:R1w7@2 F<L F:r7w8@2", "transfer 0 host 1"),
        # What an operation made before the race was noticed: steps 1 to 3 read on from the round of step 0.
        ("F:r5w6 B<F B:r6W1 L<B L:R1w7 M:w5", "round 0 transfer 2,4 device 6,7 host 1"),
        ("F:r5w6 B<F B:r4W1 L<B L:R1w7 M:w5", "round 0 device 6"),
        ("F:r5w6 B<F B:r6W1 L<B L:R2w7 M:w5", "round 0 transfer 2 device 6 host 1"),
        ("X:r8w9 F:w5 L:R2w5 Y:w8 F<L F:r5w6", "round 5 device 5,6"),  # another race's past does not clean this one
    ],
)
def test_rule(text: str, expected: str) -> None:
    """What the first race of a history spoils."""
    assert reached(text) == expected


def alloc(*pages: int) -> PageAlloc:
    """Pages get a new owner."""
    return PageAlloc(OpId(90), MAIN, 0, 2, device(Mode.WRITE, page_ids(pages)))


def test_new_owner() -> None:
    """The next owner's contents are its own, unless the page races again."""
    assert reached("F:w5 L:w5 F<L", then="F:r5w6") == "round 3 device 5,6"
    assert reached("F:w5 L:w5 F<L", alloc(5), then="F:r5w6") == "device 5"
    assert reached("F:w5 L:w5 F<L", alloc(4), then="F:r5w6") == "round 3 device 5,6"

    analyzer, findings = analysed("F:w5 L:w5 F<L L<F", alloc(5), then="F:w5 L:w5 F<L F:r5w6")
    first, second = (analyzer.blast_radius((f.earlier.op, f.later.op)) for f in findings)
    assert (first.rounds, second.rounds) == ((), (7,))
    assert second.device_pages == ((0, 5), (0, 6))


def test_new_owner_before_the_race_is_noticed() -> None:
    """What was spoiled before is replayed with its owners."""
    assert reached("F:r5w6", then="X<F X:r6w9 M:w5") == "round 0,2 device 6,9"
    assert reached("F:r5w6", alloc(6), then="X<F X:r6w9 M:w5") == "round 0 device 6"


def segment(number: int, layer: int, read: int, write: int) -> Kernel:
    """One layer of a forward round on the history's first stream."""
    accesses = device(Mode.READ, page_ids([read])), device(Mode.WRITE, page_ids([write]))
    return Kernel(OpId(90 + layer), MAIN, 0, StreamId(0), 1, number, 0, (layer, layer + 1), accesses)


def test_round_stays_spoiled() -> None:
    """Later segments of a round follow from its first ones, whatever they read; other rounds do not."""
    assert reached("F:w5 L:w5 h<*", segment(50, 0, 5, 6), segment(50, 1, 7, 8)) == "round 50 device 5,6,8"
    assert reached("F:w5 L:w5 h<*", segment(50, 0, 5, 6), segment(51, 1, 7, 8)) == "round 50 device 5,6"


def test_wrong_indices() -> None:
    """A copy that may have read wrong indices has written anything anywhere it wrote."""
    index = page_ids([3])
    fill = Kernel(OpId(90), MAIN, 0, StreamId(7), 1, 0, 0, ALL_LAYERS, (Access(Space.BUFFER, Mode.WRITE, index),))
    copy = Memcpy(
        OpId(91),
        MAIN,
        0,
        StreamId(8),
        1,
        60,
        0,
        ALL_LAYERS,
        (
            host(Mode.READ, page_ids([1, 2])),
            device(Mode.WRITE, page_ids([4, 7])),
            Access(Space.BUFFER, Mode.READ, index),
        ),
    )
    assert reached("F:w5", fill, copy) == "transfer 60 device 4,7"


def test_two_races_are_told_apart() -> None:
    """Each race has its own radius; a fingerprint has that of all its races."""
    analyzer, findings = analysed("F:w5 L:w5 F<L L<F F:w8 L:w8 F<L F:r5w6 F:r8w9")
    first, second = (analyzer.blast_radius((f.earlier.op, f.later.op)) for f in findings)
    assert (first.rounds, first.device_pages) == ((7,), ((0, 5), (0, 6)))
    assert (second.rounds, second.device_pages) == ((8,), ((0, 8), (0, 9)))
    assert findings[0].fingerprint == findings[1].fingerprint
    assert analyzer.blast_radius(findings[0].fingerprint).rounds == (7, 8)

    analyzer, findings = analysed("F:w5 L:w5 F<L L<F F:w8 L:w8 F<L F:r5w6 F:r8w6")  # both in one page
    first, second = (analyzer.blast_radius((f.earlier.op, f.later.op)) for f in findings)
    assert (first.device_pages, second.device_pages) == (((0, 5), (0, 6)), ((0, 6), (0, 8)))

    analyzer, findings = analysed("F:r5w6 L:w5 F<L L<F F:r8w9 L:w8")  # both noticed late
    first, second = (analyzer.blast_radius((f.earlier.op, f.later.op)) for f in findings)
    assert (first.rounds, second.rounds) == ((0,), (4,))


def test_relocation_and_storage() -> None:
    """A relocation carries taint to the new place; I/O out of a spoiled page is in the radius, I/O in cleans."""
    move = Relocate(
        OpId(90),
        MAIN,
        0,
        StreamId(1),
        0,
        ALL_LAYERS,
        (device(Mode.READ, page_ids([4, 5])), device(Mode.WRITE, page_ids([7, 8]))),
    )
    assert reached("F:w5 L:w5 F<L h<*", move, then="h<* F:r8w6") == "round 5 device 5,6,8"
    assert reached("F:w5 L:w5 F<L h<*", move, then="h<* F:r7w6") == "device 5,8"

    def io(kind: IoKind, mode: Mode, page: int) -> IoBegin:
        return IoBegin(OpId(90), MAIN, 0, 40, kind, 0, ALL_LAYERS, (host(mode, page_ids([page])),))

    history = "F:w5 B:r5W1 h<*"
    assert reached(history, io(IoKind.STORAGE_WRITE, Mode.READ, 1)) == "transfer 1 io 40 host 1"
    assert reached(history, io(IoKind.STORAGE_WRITE, Mode.READ, 2)) == "transfer 1 host 1"
    assert radius(history, io(IoKind.STORAGE_READ, Mode.WRITE, 1), then="L:R1w7").device_pages == ()


def test_text() -> None:
    """One line of the explanation."""
    analyzer, (finding, *_) = analysed("F:w5 L:w5 F<L F:r5w6 F:r6w7 B<F B:r7W1")
    text = explain(finding, analyzer.blast_radius((finding.earlier.op, finding.later.op)))
    assert "\n  spoiled since: 2 rounds (3–4), 3 device pages, 1 host page\n" in text
    analyzer, (finding,) = analysed("F:w5 L:w5")
    assert "spoiled since: 1 device page\n" in explain(finding, analyzer.blast_radius(finding.fingerprint))
    assert "spoiled" not in explain(finding)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit makes the radius incomplete, and is never silently left out."""
    monkeypatch.setattr(taint, "MAX_REACHED", 2)
    assert not radius("F:w5 L:w5 F<L F:r5w6 F:r6w7").complete
    assert not Analyzer(RecordingSink()).blast_radius("HC-00000000").complete

    monkeypatch.undo()
    monkeypatch.setattr(taint, "MAX_RECENT", 3)
    assert radius("F:r5w6 F:w1 L:w5").complete
    assert not radius("F:r5w6 F:w1 F:w2 L:w5").complete

    monkeypatch.undo()
    monkeypatch.setattr(taint, "MAX_SOURCES", 1)
    analyzer, findings = analysed("F:w5 L:w5 F<L L<F F:w8 L:w8 F<L F:r5w6 F:r8w9")
    found = [analyzer.blast_radius((f.earlier.op, f.later.op)) for f in findings]
    assert found[0] == found[1]
    assert found[0].rounds == (7, 8)
    assert not found[0].complete


def test_json() -> None:
    """``check --json`` gives each race its radius, in the scenario's own names."""
    path = Path(__file__).parents[1] / "cases" / "05-load-over-block-still-being-read.json"
    result = CliRunner().invoke(command, ["--json", str(path)], standalone_mode=False)
    (race,) = json.loads(result.output)["races"]
    assert race["between"] == ["s1", "s7"]
    assert race["tainted"] == {
        "rounds": ["s1"],
        "transfers": ["s4"],
        "ios": [],
        "pages": [20],
        "host_pages": [7],
        "complete": True,
    }


# -- against wrong contents ----------------------------------------------------------------------------------

SEEDS = 60
LAYERS, PAGE_SIZE, VOCABULARY = 3, 4, 512


class _Records:
    """A ``RecordSink`` that is a list."""

    writable = True
    mode = CaptureMode.OBSERVE

    def __init__(self) -> None:
        self.records: list[AnyRecord] = []

    def append(self, record: AnyRecord) -> bool:
        self.records.append(record)
        return True

    def drop(self, reason: DropReason, count: int = 1) -> None:
        raise AssertionError(f"lost {count} records: {reason.name}")

    def beat(self, host_ns: int) -> None:
        pass


@dataclass
class _Run:
    """One engine run under the adversarial schedule, and what is known about it besides the trace."""

    engine: Engine
    analyzer: Analyzer
    findings: list[Finding]
    requests_of: dict[int, tuple[int, ...]] = field(default_factory=dict)
    restores: dict[tuple[int, int], int] = field(default_factory=dict)
    """Transfer by step and restored page."""


def _config(*, host_tier: bool, early_backup: bool = False) -> EngineConfig:
    options = SchedulerOptions(max_running=6, max_extend_tokens=64, host_tier=host_tier, early_backup=early_backup)
    return EngineConfig(
        runner="pattern",
        fence="none",
        device_pages=20 if host_tier else 400,
        host_pages=64,
        page_size=PAGE_SIZE,
        layers=LAYERS,
        heads=2,
        head_dim=4,
        vocabulary=VOCABULARY,
        seed=0,
        scheduler=options,
    )


def _run(requests: list[Request], seed: int, *, early_backup: bool) -> _Run:
    bare = open_device("virtual", schedule="adversarial", seed=seed)
    kept = _Records()
    recorder = Recorder(kept, clock=bare.host_ns)
    engine = build_engine(RecordedDevice(bare, recorder), _config(host_tier=True, early_backup=early_backup), requests)
    sink = RecordingSink()
    run = _Run(engine, Analyzer(sink), sink.findings)
    scheduler = engine.scheduler
    scheduler.on_alloc = lambda owner, pages: recorder.page_alloc(owner, device(Mode.WRITE, pages))
    scheduler.on_free = lambda owner, pages: recorder.page_free(owner, device(Mode.WRITE, pages))
    scheduler.on_round = run.requests_of.__setitem__

    def on_transfer(transfer: SubmittedTransfer) -> None:
        if transfer.direction is Direction.HOST_TO_DEVICE:
            for operation in transfer.operations:
                run.restores |= {(transfer.step, page): transfer.transfer for page in operation.device_pages.tolist()}

    engine.controller.on_transfer = on_transfer

    def after_step() -> None:
        recorder.resolve()

    engine.run(requests, after_step=after_step)
    after_step()
    bare.close()
    run.analyzer.feed(kept.records)
    run.analyzer.finish()
    return run


def _reference(requests: list[Request]) -> dict[int, list[int]]:
    bare = open_device("virtual", schedule="eager")
    engine = build_engine(bare, _config(host_tier=False), requests)
    engine.run(requests)
    bare.close()
    return engine.scheduler.outputs


@pytest.mark.parametrize("early_backup", [False, True], ids=["late backup", "early backup"])
def test_wrong_contents_are_in_the_radius(early_backup: bool) -> None:
    """Without fences: every wrong page and every request with wrong tokens is in the radius of a violation.

    The opposite does not hold: a round is tainted whole, and tokens may survive. What the radius holds is
    compared with what it could hold, so that "everything" would not pass.
    """
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        requests = generate(
            24,
            seed=seed,
            tokens_per_block=PAGE_SIZE,
            vocabulary=VOCABULARY,
            reuse=0.8,
            conversations=6,
            max_blocks=8,
            max_output=8,
        )
        run = _run(requests, seed, early_backup=early_backup)
        rounds: set[int] = set()
        moved: set[int] = set()
        pages: set[tuple[int, int]] = set()
        raced: set[tuple[int, int]] = set()
        for finding in run.findings:
            if finding.verdict is Verdict.VIOLATION:
                found = run.analyzer.blast_radius((finding.earlier.op, finding.later.op))
                assert found.complete
                rounds.update(found.rounds)
                moved.update(found.transfers)
                pages.update(found.device_pages)
                for side in (finding.earlier, finding.later):
                    if side.what == "restore" and finding.space == "device":
                        raced.update((side.group, page) for page in finding.pages)
        scheduler = run.engine.scheduler
        for tenancy in run.engine.ledger.corrupted().tolist():
            restored = scheduler.restored[tenancy]
            transfer = run.restores[restored.step, restored.device_page]
            copied = transfer in moved and (0, restored.device_page) in pages
            assert copied or (transfer, restored.device_page) in raced, f"seed {seed}: {restored}"
            seen["wrong pages"] += 1
            seen["wrong copies"] += (transfer, restored.device_page) not in raced
        exposed = {request for number in rounds for request in run.requests_of[number]}
        outputs = scheduler.outputs
        wrong = {request for request, tokens in _reference(requests).items() if outputs[request] != tokens}
        assert wrong <= exposed, f"seed {seed}: requests {sorted(wrong - exposed)}"
        seen["wrong requests"] += len(wrong)
        seen["spared rounds"] += len(run.requests_of) - len(rounds)
        seen["spared requests"] += len(requests) - len(exposed)
    assert min(seen["wrong pages"], seen["wrong requests"], seen["spared rounds"], seen["spared requests"]) > 0, seen
    assert not early_backup or seen["wrong copies"] > 0, seen
