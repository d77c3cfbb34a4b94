"""Every ordering rule as a pair of histories: without the edge the race is reported, with it nothing is."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.check import PRUNE_EVERY, Totals
from hicache_obs.errors import TraceError
from hicache_obs.findings import Cause, Hazard, Proof, Verdict
from hicache_obs.records import (
    ALL_LAYERS,
    IN_ORDER,
    Access,
    Define,
    DefineSpace,
    DropReason,
    EventId,
    EventWait,
    GraphNode,
    GraphReplay,
    IoBegin,
    IoEnd,
    IoKind,
    Kernel,
    Lost,
    Memcpy,
    Mode,
    OpId,
    Relocate,
    Space,
    StreamId,
    TensorAlloc,
    TensorFree,
    ThreadId,
    Times,
    device,
    page_ids,
)
from hicache_obs.testing import History, RecordingSink, races


def analyse(text: str) -> RecordingSink:
    """Analyse a history to its end."""
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(History(text).records)
    analyzer.finish()
    return sink


@pytest.mark.parametrize(
    ("racy", "ordered"),
    [
        ("F:w5 L:w5", "F:w5 L<F L:w5"),
        ("F:w5 L:w5", "F:w5 e=F L<e L:w5"),
        ("F:w5 L<F F:w5 L:w5", "F:w5 F:w5 L<F L:w5"),  # a wait covers only what was queued before it
        ("e=F F:w5 L<e L:w5", "F:w5 e=F L<e L:w5"),  # a record covers only what was queued before it
        ("F:w5 L<e L:w5", "F:w5 e=F L<e L:w5"),  # waiting for an event never recorded does nothing
        ("F:w5 e=F e=S L<e L:w5", "F:w5 e=S e=F L<e L:w5"),  # the newest record counts
        ("F:w5 L<e e=F L:w5", "F:w5 e=F L<e e=S L:w5"),  # a re-record does not move an earlier wait
        ("F:w5 S<F L:w5", "F:w5 S<F L<S L:w5"),  # order is transitive over a third stream
        ("F:w5 S<F X<S L:w5", "F:w5 S<F X<S L<X L:w5"),  # ... or a fourth, with no work on either
        ("F:w5 e=F L:w9 h!e L:w5", "F:w5 e=F L:w9 h?e L:w5"),  # also for a stream that it has used before
        ("F:w5 e=F L:w9 L:w5 h<e", "F:w5 e=F L:w9 h<e L:w5"),
        ("F:w5 e=F h!e L:w5", "F:w5 e=F h<e L:w5"),  # the host that synchronised orders what it issues later
        ("F:w5 h<S L:w5", "F:w5 h<F L:w5"),
        ("F:w5 h<S L:w5", "F:w5 h<* L:w5"),
        ("e=F F:w5 h<e L:w5", "F:w5 e=F h<e L:w5"),
        ("F:w5 L:w5", "F:w5 L:w6"),  # disjoint pages
        ("F:w5 L:w5", "F:r5 L:R5r5"),  # readers share
        ("F:w5@1 L:w5@1", "F:w5@1 L:w5@2"),  # disjoint layers
        ("F:w5 L:w5@2", "F:w5@0-1 L:w5@2"),
        ("F:w5 L:w5", "F:w5 F:w5"),  # one stream is in order
        ("B:r7W3 L:R3w9", "B:r7W3 L<B L:R3w9"),  # host pages race too
        ("B:r7W5 L:R5w7", "B:r7W5 L<B L:R5w7"),
        ("F:w5 B:r5W1", "F:w5 B<<F B:r5W1"),
    ],
)
def test_pair(racy: str, ordered: str) -> None:
    """The first history has exactly one finding, between its only two conflicting operations; the second none."""
    assert len(analyse(racy).findings) == 1
    assert analyse(ordered).findings == []


@pytest.mark.parametrize(
    ("text", "hazard"),
    [
        ("F:w5 L:w5", Hazard.WAW_FORWARD_RESTORE),
        ("F:r5 L:w5", Hazard.WAR_FORWARD_RESTORE),
        ("F:r5w5 L:w5", Hazard.WAW_FORWARD_RESTORE),
        ("L:w5 F:w5", Hazard.WAW_FORWARD_RESTORE),
        ("L:w5 F:r5", Hazard.RAW_RESTORE_FORWARD),
        ("F:w5 B:r5W1", Hazard.RAW_FORWARD_BACKUP),
        ("B:r5W1 F:w5", Hazard.WAR_BACKUP_FORWARD),
        ("B:r5W1 L:R1w9", Hazard.HOST_REUSE),
        ("L:w5 B:r5W1", Hazard.OTHER),
    ],
)
def test_hazard(text: str, hazard: Hazard) -> None:
    """The two accesses decide the hazard's name."""
    assert [finding.hazard for finding in analyse(text).findings] == [hazard]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("F:w5 L:w5", Cause.MISSING_FENCE),
        ("F:w5 X<<F L:w5", Cause.WRONG_STREAM),
        ("F:w5 X<<F L:w5 e=X", Cause.WRONG_STREAM),
        ("F:w5 X<<F L:w5 X:w9", Cause.MISSING_FENCE),  # what the fence was meant for
        ("e=F F:w5 L<e X<<F L:w5", Cause.WRONG_STREAM),
        ("e=F F:w5 L<e X<<F L:w5 X:w9", Cause.EARLY_EVENT),
        ("F:w5 e=F e=S L<e X<<F L:w5 X:w9", Cause.EVENT_REUSE),
        ("e=F F:w5 L<e L:w5", Cause.EARLY_EVENT),
        ("F:w5 L<e L:w5", Cause.EVENT_UNRECORDED),
        ("F:w5 e=F e=S L<e L:w5", Cause.EVENT_REUSE),
        ("e=F F:w5 e=S L<e L:w5", Cause.MISSING_FENCE),  # neither record would have done
        ("L<e F:w5 L:w5", Cause.MISSING_FENCE),  # waits from before the earlier operation were meant for others
        ("e=F L<e F:w5 L:w5", Cause.MISSING_FENCE),
        ("F:w5 ~1 L:w5", Cause.RECORDS_LOST),
    ],
)
def test_cause(text: str, cause: Cause) -> None:
    """The finding says why the existing waits do not help."""
    assert [finding.cause for finding in analyse(text).findings] == [cause]


def test_wrong_stream_names_the_stream_that_waits_instead() -> None:
    """A fence on a stream that runs no copy is the bug of a real pull request."""
    (finding,) = analyse("F:w5 X<<F L:w5").findings

    assert finding.wrong_waiter == "X"
    assert (finding.missing_edge.on, finding.missing_edge.waiter) == ("F", "L")


def test_polled_order_is_not_a_finding_but_is_counted() -> None:
    """What the host learned from a query orders, on a level of its own."""
    sink = analyse("F:w5 e=F h?e L:w5")

    assert sink.findings == []
    assert sink.weak == {(Hazard.WAW_FORWARD_RESTORE, "polled"): 1}


@pytest.mark.parametrize(
    ("text", "proofs"),
    [
        ("F:w5 ~1 L:w5", [Proof.UNKNOWN]),  # the fence itself may be among the lost
        ("F:w5 L<F ~1 L:w5", []),  # what was ordered before the loss stays ordered
        ("F:w5 e=F ~1 L<e L:w5", [Proof.UNKNOWN]),  # e may have been re-recorded elsewhere
        ("F:w5 ~1 e=F L<e L:w5", []),
        ("F:w5 ~1 h<* L:w5", []),  # a device sync heals what it covers
        ("~1 F:w5 L:w5", [Proof.NONE]),  # everything about this pair was seen
    ],
)
def test_losses_make_pairs_unknown_never_ordered(text: str, proofs: list[Proof]) -> None:
    """A drop sets a watermark; nothing learned from mutable state before it is believed."""
    assert [finding.proof for finding in analyse(text).findings] == proofs


def test_times_decide_between_latent_and_violation() -> None:
    """Without times a race is latent; a later operation that ran wholly first is the worst violation."""
    history = History("F:w5 L:w5")
    for start, verdict in [(3000, Verdict.LATENT), (1999, Verdict.VIOLATION), (0, Verdict.VIOLATION)]:
        sink = RecordingSink()
        analyzer = Analyzer(sink)
        analyzer.feed(history.records)
        analyzer.feed(
            [
                Times(history.records[-2].op, history.records[-1].thread, 0, start_ns=1000, end_ns=2000),
                Times(history.records[-1].op, history.records[-1].thread, 0, start_ns=start, end_ns=start + 10),
            ]
        )
        analyzer.finish()

        assert [finding.verdict for finding in sink.findings] == [verdict], start


@pytest.mark.parametrize(
    ("start", "verdict"), [(1950, Verdict.LATENT), (1949, Verdict.VIOLATION)], ids=["maybe", "surely"]
)
def test_both_clock_errors_count(start: int, verdict: Verdict) -> None:
    """The earlier operation ended at 2,000 ± 30, the later one began at ``start`` ± 20."""
    records = History("F:w5 L:w5").records
    first, last = records[-2:]
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.feed([Times(first.op, first.thread, 0, start_ns=1000, end_ns=2000, error_ns=30)])
    analyzer.feed([Times(last.op, last.thread, 0, start_ns=start, end_ns=2100, error_ns=20)])

    assert [finding.verdict for finding in sink.findings] == [verdict]


def test_a_proven_pair_that_was_measured_broken_is_a_contradiction() -> None:
    """An edge says kept, the clock says broken: reported, unless the clock error explains it."""
    history = History("F:w5 L<F L:w5")
    first, last = history.records[-3], history.records[-1]
    for error, count in [(0, 1), (50, 0)]:
        sink = RecordingSink()
        analyzer = Analyzer(sink)
        analyzer.feed(history.records)
        analyzer.feed(
            [
                Times(first.op, first.thread, 0, start_ns=1000, end_ns=2000, error_ns=error),
                Times(last.op, last.thread, 0, start_ns=1900, end_ns=2100, error_ns=error),
            ]
        )
        analyzer.finish()

        assert [finding.verdict for finding in sink.findings] == [Verdict.CONTRADICTION] * count


def test_layer_copies_are_one_group_and_each_layer_is_judged_alone() -> None:
    """A reader that waited for layer 1 only races with the copy of layer 2 of the same pages."""
    text = "L:w5@0 a=L L:w5@1 b=L L:w5@2 c=L F<b F:r5@0 F:r5@1 F:r5@2"
    assert [f.layers for f in analyse(text).findings] == [(2, 3)]
    assert analyse(text.replace("F:r5@2", "F<c F:r5@2")).findings == []


def test_pages_of_a_pair_are_exactly_the_shared_ones() -> None:
    """And the report names them once."""
    (finding,) = analyse("F:w1,2,3r9 L:w2,3,4").findings

    assert finding.pages == (2, 3)


@pytest.mark.parametrize(("order", "count"), [("", 1), ("L<F ", 0)])
def test_pairs_far_apart_are_still_found(order: str, count: int) -> None:
    """History is forgotten only once the host knows it is over, however much happens in between."""
    noise = "S:w9 " * 2000

    assert len(analyse(f"F:w5 F:w6 {order}{noise}L:w5").findings) == count
    assert len(analyse(f"F:w5 F:w6 {order}{noise}h<S {noise}L:w5").findings) == count


def test_completed_history_is_forgotten() -> None:
    """Rounds the host has synchronised with cost no memory; a race after them is found."""
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(History("F:w5 L<F L:w5 h<* " * 1000 + "F:w5 L:w5").records)
    analyzer.finish()

    assert len(sink.findings) == 1
    assert analyzer.retained_groups < 2 * PRUNE_EVERY
    assert analyzer.forgotten == 0


@pytest.mark.parametrize(("moved", "cause"), [(5, Cause.STALE_ADDRESS), (7, Cause.MISSING_FENCE)])
def test_one_moved_page_is_enough(moved: int, cause: Cause) -> None:
    """The pair shares pages 5 and 6 through two accesses."""
    records = list(History("F:w5r6 F:w20 X:w5,6").records)
    accesses = device(Mode.READ, page_ids([moved])), device(Mode.WRITE, page_ids([20]))
    records[-2] = Relocate(OpId(1), ThreadId(0), 1000, records[-2].stream, 0, ALL_LAYERS, accesses)
    sink = RecordingSink()
    Analyzer(sink).feed([*records, Times(OpId(2), ThreadId(0), 3000, 2000, 2500)])

    assert [finding.cause for finding in sink.findings if finding.earlier.op == 0] == [cause]


def test_device_pages_name_a_conflict_that_is_about_host_pages_too() -> None:
    (finding,) = analyse("B:r5W1 L:R1w5").findings
    (other,) = finding.also

    assert (finding.hazard, finding.space, finding.pages) == (Hazard.OTHER, "device", (5,))
    assert (other.space, other.pages) == ("host", (1,))


def _replay(op: int, graph: int, stream: int, *, nodes: int = 0) -> GraphReplay:
    accesses = () if nodes else (device(Mode.WRITE, page_ids([5])),)
    return GraphReplay(OpId(op), ThreadId(0), 0, graph, StreamId(stream), 0, op, nodes, (0, 1), accesses)


def test_a_replay_that_lacks_entries_is_over_with_the_next_one() -> None:
    """Its stream goes on after those that are there."""
    entry = GraphNode(OpId(1), ThreadId(0), 0, 0, IN_ORDER, None, (0, 1), (device(Mode.WRITE, page_ids([5])),))
    for stream, pairs in ((1, []), (2, [(0, 2)])):
        sink = RecordingSink()
        analyzer = Analyzer(sink)
        analyzer.feed([_replay(0, 1, 1, nodes=2), entry, _replay(2, 2, stream)])
        analyzer.finish()

        assert sink.pairs == pairs


@pytest.mark.parametrize(("graph", "pairs"), [(1, []), (2, [(0, 2)])])
def test_a_replay_that_was_cut_off_by_a_loss_still_precedes_the_next(graph: int, pairs: list[tuple[int, int]]) -> None:
    """What was read of it is ordered before the next replay of that graph on any stream; of another graph it is not."""
    entry = GraphNode(OpId(1), ThreadId(0), 0, 0, IN_ORDER, None, (0, 1), (device(Mode.WRITE, page_ids([5])),))
    lost = Lost(OpId(-1), ThreadId(0), 0, 1, DropReason.RING_FULL)
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed([_replay(0, 1, 1, nodes=2), entry, lost, _replay(2, graph, 2)])
    analyzer.finish()

    assert sink.pairs == pairs


@pytest.mark.parametrize(("stream", "proofs"), [(1, []), (2, [Proof.UNKNOWN])])
def test_a_stream_goes_on_behind_a_replay_that_was_cut_off(stream: int, proofs: list[Proof]) -> None:
    """Behind the entries that were read; another stream does not."""
    entry = GraphNode(OpId(1), ThreadId(0), 0, 0, IN_ORDER, None, (0, 1), (device(Mode.WRITE, page_ids([5])),))
    lost = Lost(OpId(-1), ThreadId(0), 0, 1, DropReason.RING_FULL)
    later = Kernel(OpId(2), ThreadId(0), 0, StreamId(stream), 0, 2, 0, (0, 1), (device(Mode.WRITE, page_ids([5])),))
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed([_replay(0, 1, 1, nodes=2), entry, lost, later])
    analyzer.finish()

    assert [finding.proof for finding in sink.findings] == proofs


@pytest.mark.parametrize("after", range(4))
def test_an_event_in_a_graph_covers_the_entries_before_it(after: int) -> None:
    """Those that it names, and no other: two entries write pages 5 and 6, the third records the event."""
    head = ThreadId(0), 0
    writes = [(device(Mode.WRITE, page_ids([page])),) for page in (5, 6)]
    entries = [GraphNode(OpId(1 + n), *head, n, 0, None, (0, 1), access) for n, access in enumerate(writes)]
    entries.append(GraphNode(OpId(3), *head, 2, after, EventId(9), (0, 1), ()))
    wait = EventWait(OpId(4), *head, EventId(9), StreamId(2))
    later = Kernel(OpId(5), *head, StreamId(2), 0, 5, 0, (0, 1), (device(Mode.WRITE, page_ids([5, 6])),))
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed([_replay(0, 1, 1, nodes=3), *entries, wait, later])
    analyzer.finish()

    racing = {page for finding in sink.findings for page in finding.pages}
    assert racing == {page for bit, page in enumerate((5, 6)) if not after >> bit & 1}


def test_what_the_sink_is_told_of_records_and_checks() -> None:
    """Each record and each page looked up once, in whatever parts the trace is fed."""
    records = History("h+5 F:w5 L<F B:r5W1 L<B L:R1w5").records
    index = (Access(Space.BUFFER, Mode.READ, page_ids([3])),)
    records.append(Kernel(OpId(9), ThreadId(0), 0, StreamId(9), 0, 9, 0, (0, 1), index))
    counts = []
    for parts in (1, 3):
        sink = RecordingSink()
        analyzer = Analyzer(sink)
        for part in range(parts):
            analyzer.feed(records[part * len(records) // parts : (part + 1) * len(records) // parts])
        counts.append((sink.records, dict(sink.checked)))
    assert counts[0] == counts[1]
    assert counts[0][0] == len(records)
    assert counts[0][1][Hazard.METADATA_WAR] == 1
    assert counts[0][1][Hazard.LIFETIME] == 3


def test_the_engine_has_the_name_that_the_trace_states() -> None:
    analyzer = Analyzer(RecordingSink())
    assert analyzer.engine == ""
    analyzer.feed([Define(OpId(-1), ThreadId(0), 0, DefineSpace.ENGINE, 0, "an engine 1.2")])
    assert analyzer.engine == "an engine 1.2"


def test_totals() -> None:
    """Pages of a restore count once, those that were touched before also as pairs; losses add up."""
    analyzer = Analyzer(RecordingSink())
    records = History("F:w5,6 L<F L:R1w5,7@0 L:R1w5,7@1 ~3 F<L F:r5 ~2").records
    analyzer.feed(records[:6])
    analyzer.feed(records[6:])

    assert analyzer.totals == Totals(len(records), pages_checked=2, pairs_checked=1, lookups=2, lost=5, shared=0)


def test_absurd_page_ids_are_refused() -> None:
    """A damaged trace must not make the shadow take all memory."""
    with pytest.raises(TraceError, match="67108864"):
        analyse(f"F:w{1 << 26} L:w5")


def random_program(rng: random.Random) -> str:
    """A history over three streams, three events, four pages and three layers, with every kind of order."""
    steps = []
    streams, events = ["F", "L", "B"], ["a", "b", "c"]
    for _ in range(rng.randint(4, 18)):
        stream, event = rng.choice(streams), rng.choice(events)
        kind = rng.random()
        if kind < 0.5:
            pages = ",".join(map(str, sorted(rng.sample(range(4), rng.randint(1, 2)))))
            more = f"{rng.choice('rw')}{rng.randrange(4)}" if rng.random() < 0.4 else ""
            step = f"{stream}:{rng.choice('rwW')}{pages}{more}"
            if rng.random() < 0.4:  # a run over layers of the same pages: one group, or nearly one
                steps.extend(f"{step}@{layer}" for layer in rng.choice(["0", "01", "012", "02", "10", "0112"]))
            else:
                steps.append(step + rng.choice(["", "", f"@{rng.randrange(3)}", f"@{rng.randrange(2)}-2"]))
        elif kind < 0.65:
            steps.append(f"{event}={stream}")
        elif kind < 0.8:
            steps.append(f"{stream}<{event}")
        elif kind < 0.88:
            steps.append(f"{stream}<{rng.choice([s for s in streams if s != stream])}")
        elif kind < 0.94:
            steps.append(rng.choice([f"h<{event}", f"h<{stream}", f"h?{event}", f"h!{event}"]))
        elif kind < 0.96:
            steps.append("h<*")
    return " ".join(steps)


@pytest.mark.parametrize("block", range(20))
def test_agrees_with_brute_force(block: int) -> None:
    """Exactly the conflicting pairs that no path orders: none missed, none too many, on 3,000 random programs."""
    pairs = 0
    for seed in range(block * 150, block * 150 + 150):
        text = random_program(random.Random(seed))
        if not text:
            continue
        expected = races(History(text).records, polled=True)
        pairs += len(expected)

        assert set(analyse(text).pairs) == expected, f"seed {seed}: {text}"
    assert pairs > 100


@pytest.mark.parametrize("pages", ["1,5000", "5000,1", "3,70000,9"])
def test_page_numbers_of_any_size_in_any_order(pages: str) -> None:
    """The largest id of an access may stand anywhere in it, and be far above all ids before it."""
    top = max(pages.split(","), key=int)

    assert analyse(f"F:w{pages} L:w{top}").pairs == [(0, 1)]
    assert analyse(f"F:w{top} L:w{pages}").pairs == [(0, 1)]
    assert analyse(f"F:w{pages} L<F L:w{top}").pairs == []


@pytest.mark.parametrize(
    ("text", "secondary"),
    [
        ("F:w5 L:w5 L:w5", [False, True]),
        ("F:w5 L:w5 h+5 L:w5", [False, True]),  # both are reported at the end: the page got its owner before that
        ("F:w5 L:w5 L:w6", [False]),
        ("F:w5,6 L:w5 L:w6 L:w6", [False, False, True]),
        ("F:w5,6 L:w5 L:w5,6", [False, True]),  # one page of two is enough
    ],
)
def test_a_page_that_raced_before(text: str, secondary: list[bool]) -> None:
    """Later races of the same page are told apart: they may be consequences."""
    assert [finding.secondary for finding in analyse(text).findings] == secondary


@pytest.mark.parametrize(("given", "secondary"), [("h+5", False), ("h+6", True), ("h-5", True)])
def test_a_new_owner_is_not_to_blame(given: str, secondary: bool) -> None:
    """A page that is given out again starts afresh; another page, or giving it away, does not do that."""
    records = History(f"F:w5 L:w5 {given} S<F S<L L<F S:w5 L:w5").records
    first, second = (record.op for record in records if isinstance(record, Memcpy))
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    for record in records:
        analyzer.feed([record])
        if record.op in (first, second):
            analyzer.feed([Times(record.op, record.thread, 0, 0, 100)])
    analyzer.finish()

    assert [finding.secondary for finding in sink.findings if not finding.misuse and finding.earlier.op == 6] == [
        secondary
    ]


@pytest.mark.parametrize("freed", [0, 1, None])
def test_one_freed_block_is_enough(freed: int | None) -> None:
    """Two operations share two blocks; the allocator got one of them back in between."""
    both = (Access(Space.BUFFER, Mode.WRITE, page_ids([0, 1])),)
    work = [Kernel(OpId(op), ThreadId(0), 0, StreamId(op), 0, op, 0, ALL_LAYERS, both) for op in (10, 20)]
    tensors = [TensorAlloc(OpId(block), ThreadId(0), 0, block, block, StreamId(10)) for block in (0, 1)]
    frees = [] if freed is None else [TensorFree(OpId(15), ThreadId(0), 0, freed)]
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed([*tensors, work[0], *frees, work[1]])
    analyzer.finish()

    assert [finding.hazard for finding in sink.findings] == [Hazard.METADATA_WAR if freed is None else Hazard.LIFETIME]


@pytest.mark.parametrize("again", [0, 1, None])
def test_a_block_that_is_used_after_its_free(again: int | None) -> None:
    """Both blocks were given back before the first operation; one is a new tensor's by the time of the second."""
    both = (Access(Space.BUFFER, Mode.WRITE, page_ids([0, 1])),)
    work = [Kernel(OpId(op), ThreadId(0), 0, StreamId(op), 0, op, 0, ALL_LAYERS, both) for op in (10, 20)]
    tensors = [TensorAlloc(OpId(block), ThreadId(0), 0, block, block, StreamId(10)) for block in (0, 1)]
    frees = [TensorFree(OpId(5), ThreadId(0), 0, block) for block in (0, 1)]
    new = [] if again is None else [TensorAlloc(OpId(15), ThreadId(0), 0, 2, again, StreamId(10))]
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed([*tensors, *frees, work[0], *new, work[1]])
    analyzer.finish()

    (finding,) = sink.findings
    expected = (
        (Hazard.METADATA_WAR, Cause.MISSING_FENCE) if again is None else (Hazard.LIFETIME, Cause.NO_RECORD_STREAM)
    )
    assert (finding.hazard, finding.cause) == expected


def test_transfers_one_after_the_other_share_a_clock() -> None:
    """One for each that is under way at once, not for each that there ever was."""

    def actors(together: int) -> int:
        analyzer = Analyzer(RecordingSink())
        for first in range(0, 40, together):
            ios = range(first, first + together)
            analyzer.feed(IoBegin(OpId(io), ThreadId(0), 0, io, IoKind.STORAGE_READ, 0, (0, 1), ()) for io in ios)
            analyzer.feed(IoEnd(OpId(io), ThreadId(0), 0, io) for io in ios)
        return analyzer._order.actors

    assert actors(2) == actors(1) + 1
    assert actors(4) == actors(1) + 3


def test_pairs_of_an_operation_are_told_oldest_first() -> None:
    """Whatever streams they are on: two, and more."""
    assert analyse("F:w6 S:w5 F:w5 L:w5").pairs == [(1, 2), (1, 3), (2, 3)]
    assert analyse("F:w6 S:w5 F:w5 X:w5 L:w5").pairs[-3:] == [(1, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize(
    ("ids", "page", "shared"),
    [
        (np.arange(3000, 5048), 4000, True),
        (np.arange(3000, 5048), 2999, False),
        (np.arange(3000, 5048), 5048, False),
        (np.arange(5047, 2999, -1), 4000, True),
        (np.where(np.arange(2048) == 5, 4, np.arange(2048)), 4, True),
        (np.where(np.arange(2048) == 5, 4, np.arange(2048)), 5, False),  # as long as if it were there
        (np.where(np.arange(2048) == 5, 9000, np.arange(2048)), 9000, True),
        (np.arange(0, 4096, 2), 4094, True),
        (np.arange(0, 4096, 2), 2047, False),
        (np.append(np.arange(2047), 9000), 9000, True),
        (np.append(np.arange(2047), 9000), 2047, False),
    ],
)
def test_long_accesses(ids: np.ndarray[Any, np.dtype[np.int64]], page: int, shared: bool, writes: bool) -> None:
    """Consecutive ids, others, and those that look like it; the long access comes first, or second."""
    long = device(Mode.WRITE if writes else Mode.READ, ids.astype(np.int64))
    short = device(Mode.WRITE, np.array([page], np.int64))
    for first, second in ((long, short), (short, long)):
        sink = RecordingSink()
        analyzer = Analyzer(sink)
        work = ((1, first), (2, second))
        analyzer.feed(Kernel(OpId(op), ThreadId(0), 0, StreamId(op), 0, op, 0, (0, 1), (what,)) for op, what in work)
        analyzer.finish()
        assert sink.pairs == [(1, 2)] * shared
