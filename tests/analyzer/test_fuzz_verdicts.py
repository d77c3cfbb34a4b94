"""Random traces with random device times: each pair's verdict, and what a finding says of the two operations."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.findings import Finding, Proof, Timing, Verdict
from hicache_obs.records import GraphReplay, Kernel, Memcpy, Mode, Record, Relocate, ThreadId, Times
from hicache_obs.testing import History, RecordingSink, races
from hicache_obs.testing.programs import random_program

PROGRAMS = int(os.environ.get("HICACHE_OBS_FUZZ", "2000")) // 4
PARTS = 4
MAIN = ThreadId(0)


def timed(records: Sequence[Record], rng: random.Random) -> list[Times]:
    """Times of most operations on streams; some are known in another order than they were issued in."""
    found = []
    for record in records:
        if isinstance(record, Kernel | Memcpy | Relocate | GraphReplay) and rng.random() < 0.9:
            start = rng.randrange(200)
            found.append(Times(record.op, MAIN, 0, start, start + rng.randint(1, 60), rng.choice((0, 0, 5))))
    if rng.random() < 0.3:
        rng.shuffle(found)
    return found


def timing(pair: tuple[int, int], times: Sequence[Times]) -> Timing:
    """What is known of a pair when its later operation's times come."""
    known: dict[int, Times] = {}
    for record in times:
        known[record.op] = record
        if record.op == pair[1]:
            break
    if pair[0] not in known or pair[1] not in known:
        return Timing.UNTIMED
    first, second = known[pair[0]], known[pair[1]]
    late = second.start_ns >= first.end_ns - first.error_ns - second.error_ns
    return Timing.KEPT if late else Timing.BROKEN


def shared(first: Record, second: Record) -> dict[tuple[str, int], tuple[int, ...]]:
    """Pages that two operations conflict on, by space and pool."""
    found: dict[tuple[str, int], set[int]] = defaultdict(set)
    for one in first.accesses:  # type: ignore[attr-defined]
        for other in second.accesses:  # type: ignore[attr-defined]
            if one.space is other.space and one.pool == other.pool and Mode.WRITE in (one.mode, other.mode):
                found[one.space.name.lower(), one.pool] |= set(one.ids.tolist()) & set(other.ids.tolist())
    return {key: tuple(sorted(pages)) for key, pages in found.items() if pages}


def told(finding: Finding) -> dict[tuple[str, int], tuple[int, ...]]:
    return {
        (finding.space, finding.pool): finding.pages,
        **{(also.space, also.pool): also.pages for also in finding.also},
    }


@pytest.mark.parametrize("part", range(PARTS))
def test_verdicts(part: int) -> None:
    """Unordered pairs are violations if they were measured in the wrong order, ordered ones contradictions."""
    seen = dict.fromkeys(Verdict, 0)
    for seed in range(part, PROGRAMS, PARTS):
        rng = random.Random(-seed)
        records = random_program(seed)
        times = timed(records, rng)
        sink = RecordingSink()
        analyzer = Analyzer(sink)
        analyzer.feed(records)
        analyzer.feed(times)
        analyzer.finish()

        expected = races(records, polled=True)
        whole = {record.op: record for record in records if not isinstance(record, GraphReplay) or not record.nodes}
        for finding in sink.findings:
            pair = finding.earlier.op, finding.later.op
            if finding.misuse:
                continue
            seen[finding.verdict] += 1
            where = f"seed {seed}: {pair}"
            if finding.verdict is Verdict.CONTRADICTION:
                assert timing(pair, times) is Timing.BROKEN, where
                assert finding.proof is Proof.ORDERED, where
            else:
                assert pair in expected, where
                assert finding.timing is timing(pair, times), where
                broken = finding.timing is Timing.BROKEN
                assert finding.verdict is (Verdict.VIOLATION if broken else Verdict.LATENT), where
            if pair[0] in whole and pair[1] in whole:
                first, second = whole[pair[0]], whole[pair[1]]
                assert told(finding) == shared(first, second), where
                (low, high), (start, end) = first.layers, second.layers  # type: ignore[attr-defined]
                assert finding.layers == (max(low, start), min(high, end)), where
                assert (finding.earlier.layers, finding.later.layers) == ((low, high), (start, end)), where
                assert (finding.earlier.thread, finding.later.issued_ns) == (first.thread, second.host_ns), where
        assert set(sink.pairs) >= expected, f"seed {seed}"
    assert min(seen[verdict] for verdict in (Verdict.VIOLATION, Verdict.LATENT, Verdict.CONTRADICTION)) > PROGRAMS / 50


@pytest.mark.parametrize("part", range(PARTS))
def test_measured_order_of_ordered_pairs(part: int) -> None:
    """Each operation waits for all before it; those measured before the last one on a page of theirs are reported."""
    found = 0
    for seed in range(part, PROGRAMS, PARTS):
        rng = random.Random(seed)
        steps: list[str] = []
        work: list[tuple[str, str, set[int], int]] = []
        for _ in range(rng.randint(2, 12)):
            stream, mode, pages = rng.choice("FGHIJ"), rng.choice("rw"), sorted(rng.sample(range(3), rng.randint(1, 3)))
            steps += [f"{stream}<{other}" for other in "FGHIJ" if other != stream]
            work.append((stream, mode, set(pages), len(steps)))
            steps.append(f"{stream}:{mode}{','.join(map(str, pages))}")
        records = History(" ".join(steps)).records
        times = timed(records, rng)
        sink = RecordingSink()
        analyzer = Analyzer(sink)
        analyzer.feed([*records, *times])
        analyzer.finish()

        expected = set()
        for index, (stream, mode, pages, op) in enumerate(work):
            for page in pages:
                before = [item for item in work[:index] if page in item[2] and "w" in (mode, item[1])]
                if before and before[-1][0] != stream and timing((before[-1][3], op), times) is Timing.BROKEN:
                    expected.add((before[-1][3], op))
        assert set(sink.pairs) == expected, f"seed {seed}: {' '.join(steps)}"
        assert all(finding.verdict is Verdict.CONTRADICTION for finding in sink.findings)
        found += len(expected)
    assert found > PROGRAMS / PARTS / 2
