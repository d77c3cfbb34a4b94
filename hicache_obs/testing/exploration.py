"""Systematic exploration: a program of streams and events, run once for every way its host code can go.

What the device may do needs no enumeration: for one fixed host trace the analyzer decides every pair of accesses for
all device schedules at once. What is left is what the *host* does, and that can depend on two things here: the answer
of a query, and which host thread runs next. Both are choice points. The program is run again and again, each run
forced along a prefix of choices and free after it, until every branch has been taken or a budget is spent.

* A query of work that the host has observed already (or that was never recorded) is True, whatever the device does:
  forced, not branched. Any other may be True, which joins the host's clock, or False, which orders nothing and so
  never removes a race. False is never forced here: what is queued needs nothing more from the host to complete.
* A record is answered False ``max_false`` times at most, then True: a polling loop ends.
* Host threads (``World.spawn``) change over at their calls, with a bounded number of preemptions (``turns``).

The program must be the same in every run but for these choices: no clock, no random numbers without a seed, no
threads of its own. All runs are made in the calling thread. No torch unless the program imports it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from hicache_obs.analyzer import Analyzer, explain
from hicache_obs.errors import ConfigError, DeadlockError, StreamError
from hicache_obs.findings import ExitCode, Finding, Hazard, Verdict
from hicache_obs.recorder.nvtx_ranges import NoRanges
from hicache_obs.recorder.recorded import Recorder
from hicache_obs.records import (
    Access,
    AnyRecord,
    CaptureMode,
    Define,
    DropReason,
    EventQuery,
    EventSync,
    EventWait,
    HostSync,
    Record,
    RecordStream,
    ThreadRecv,
    WaitStream,
)
from hicache_obs.streams.runner import Item
from hicache_obs.streams.virtual import VirtualDevice
from hicache_obs.testing.choices import QUERY_OPTIONS, Choice, Prefix, Script
from hicache_obs.testing.recording import RecordingSink
from hicache_obs.testing.turn_device import TurnDevice
from hicache_obs.testing.turns import Stopped, Turns
from hicache_obs.testing.world import World

MAX_RUNS: Final = 10_000
MAX_FALSE: Final = 3
MAX_CALLS: Final = 100_000
PREEMPTIONS: Final = 2

Program = Callable[[World], None]
_Checks = dict[bytes, Counter[Hazard]]
"""``Execution.checks`` by ``Execution.work``, on which alone they depend."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far one run may go.

    Attributes:
        max_false: How often one record may be answered False.
        preemptions: How often a host thread that could go on may lose its turn, in one run.
        max_calls: Stream calls of one run.

    Raises:
        ConfigError: A number is too small.
    """

    max_false: int = MAX_FALSE
    preemptions: int = PREEMPTIONS
    max_calls: int = MAX_CALLS

    def __post_init__(self) -> None:
        for name, lowest in (("max_false", 0), ("preemptions", 0), ("max_calls", 1)):
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name}: {getattr(self, name)}; expected an integer ≥ {lowest}")


@dataclass(frozen=True, slots=True)
class Execution:
    """One run.

    Attributes:
        choices: What it chose; ``execute(program, choices)`` is the same run again.
        made: The same, with what there was to choose.
        findings: What the analyzer reports for it, for all device schedules.
        error: What the program raised; empty if it came to its end.
        records: Its trace, without device times.
        history, work: Digests of what the host did, and of the work it submitted with its pages.
        checks: Pairs of accesses by hazard that nothing but waits and observations of the host keeps in order.
        weak: Pairs that only the answer of a query orders.
        lookups: Pages of any operation that had an earlier access.
        forced: Queries whose answer was known before.
        bounded_queries: Queries that had to be True because the record had been False often enough.
        bounded_turns: Calls at which a thread kept its turn because the preemptions were used up.
    """

    choices: str
    made: tuple[Choice, ...]
    findings: tuple[Finding, ...]
    error: str
    records: tuple[AnyRecord, ...]
    history: bytes
    work: bytes
    checks: Counter[Hazard]
    weak: int
    lookups: int
    forced: int
    bounded_queries: int
    bounded_turns: int


@dataclass(slots=True)
class Race:
    """All findings of one fingerprint.

    Attributes:
        example: The first.
        choices: Of the run it was found in.
        pairs: Operation pairs, over all runs.
        runs: Runs it was found in.
    """

    example: Finding
    choices: str
    pairs: int = 0
    runs: int = 0


@dataclass(slots=True)
class Failure:
    """Runs that ended with one error: the first line of its text is the same.

    Attributes:
        error: What the program raised in the first of them.
        choices: Of the first such run.
        runs: How many there were.
    """

    error: str
    choices: str
    runs: int = 0


@dataclass(slots=True)
class Exploration:
    """What an exploration has seen.

    Attributes:
        bounds: Of each run.
        runs: Runs made.
        open: Branches not followed yet.
        queries, turns: Choice points: queries with two answers, calls with several threads to go on.
        forced: Queries of all runs whose answer was known before, so that there was nothing to choose.
        bounded_queries, bounded_turns: Of all runs; see ``Execution``. If both are 0, the bounds cut nothing off.
        deepest: Most choices of one run.
        checks: Pairs that need an order, by hazard, over all runs.
        weak: Pairs that only the answer of a query orders, over all runs.
        lookups: Pages of any operation that had an earlier access, over all runs; 0 means that nothing was checked.
        races: By fingerprint.
        unknown: Pairs that could not be decided; 0, as nothing is lost here.
        failures: By the first line of the error.
    """

    bounds: Bounds
    runs: int = 0
    open: int = 0
    queries: int = 0
    turns: int = 0
    forced: int = 0
    bounded_queries: int = 0
    bounded_turns: int = 0
    deepest: int = 0
    checks: Counter[Hazard] = field(default_factory=Counter)
    weak: int = 0
    lookups: int = 0
    races: dict[str, Race] = field(default_factory=dict)
    unknown: int = 0
    failures: dict[str, Failure] = field(default_factory=dict)
    _histories: set[bytes] = field(default_factory=set)
    _workloads: set[bytes] = field(default_factory=set)

    @classmethod
    def of(cls, run: Execution, bounds: Bounds) -> Exploration:
        """What one run alone shows; its other branches do not count as open."""
        found = cls(bounds)
        found.add(run, run.made)
        return found

    @property
    def exhausted(self) -> bool:
        """Every choice was followed to its end, within the bounds."""
        return not self.open

    @property
    def histories(self) -> int:
        """Distinct host traces."""
        return len(self._histories)

    @property
    def workloads(self) -> int:
        """Distinct sequences of submitted work, pages included: as often did the host really do something else."""
        return len(self._workloads)

    @property
    def exit_code(self) -> ExitCode:
        """1 if a race or an error was found; 3 if some runs are missing or nothing was checked; else 0."""
        if self.races or self.failures:
            return ExitCode.FINDINGS
        return ExitCode.CLEAN if self.exhausted and self.lookups and not self.unknown else ExitCode.NOTHING_CHECKED

    def explain(self) -> str:
        """Every race and error with the choices that lead to it, as text; empty if there is none."""
        parts = [f"{explain(race.example)}\n  choices  {race.choices or '(none)'}" for race in self.races.values()]
        parts += [f"{failure.error}\n  choices  {failure.choices or '(none)'}" for failure in self.failures.values()]
        return "\n\n".join(parts)

    def require_clean(self) -> None:
        """For tests: AssertionError, with everything that was found, unless the exit code is 0."""
        if self.exit_code is ExitCode.FINDINGS:
            raise AssertionError(f"explored {self.runs} runs\n\n{self.explain()}")
        if not self.lookups:
            raise AssertionError(f"explored {self.runs} runs: no access had an earlier one, so nothing was checked")
        if not self.exhausted:
            raise AssertionError(f"explored {self.runs} runs, nothing found, but not all: raise max_runs")

    def add(self, run: Execution, new: Sequence[Choice]) -> None:
        """Count ``run``, whose choices ``new`` no earlier run has come to."""
        self.runs += 1
        self.deepest = max(self.deepest, len(run.made))
        self.queries += sum(choice.options == QUERY_OPTIONS for choice in new)
        self.turns += sum(choice.options != QUERY_OPTIONS for choice in new)
        self.forced += run.forced
        self.bounded_queries += run.bounded_queries
        self.bounded_turns += run.bounded_turns
        self.checks += run.checks
        self.weak += run.weak
        self.lookups += run.lookups
        self._histories.add(run.history)
        self._workloads.add(run.work)
        for finding in run.findings:
            if finding.verdict is Verdict.UNKNOWN:
                self.unknown += 1
            else:
                race = self.races.setdefault(finding.fingerprint, Race(finding, run.choices))
                race.pairs += 1
        for name in {finding.fingerprint for finding in run.findings} & self.races.keys():
            self.races[name].runs += 1
        if run.error:
            name = run.error.partition("\n")[0]  # what follows may hold addresses, which differ from run to run
            self.failures.setdefault(name, Failure(run.error, run.choices)).runs += 1


def explore(
    program: Program,
    *,
    bounds: Bounds | None = None,
    max_runs: int = MAX_RUNS,
    stop: bool = False,
    on_run: Callable[[Exploration, Execution], None] | None = None,
) -> Exploration:
    """Run ``program`` for every choice its host code leaves open, depth first, and judge every run.

    Args:
        program: Called with a fresh ``World`` each time; uses its device, threads and channels. What it raises is a
            failure of that run, AssertionError included, so it may check its own results.
        bounds: Of each run; default ``Bounds()``.
        max_runs: Budget. A space that is not exhausted by then is reported as such.
        stop: Stop at the first run with a race or an error.
        on_run: Told of every run, after it was counted.

    Raises:
        ConfigError: A number is too small.
        StreamError: The program does not do the same when it makes the same choices.
    """
    if max_runs < 1:
        raise ConfigError(f"max_runs: {max_runs}; expected an integer ≥ 1")
    bounds = bounds or Bounds()
    found = Exploration(bounds)
    checks: _Checks = {}
    todo = [Prefix()]
    while todo and found.runs < max_runs:
        prefix = todo.pop()
        script = Script(prefix.text, prefix.base[: prefix.at + 1])
        run = _execute(program, script, bounds, checks)
        if script.unused:
            raise StreamError(
                f"the program is not the same in every run: it ended after {len(run.made)} of the choices "
                f"{prefix.text}; it must not depend on time, addresses, or anything else outside it"
            )
        since = len(prefix.text)
        todo += script.branches(since)
        found.add(run, run.made[since:])
        found.open = len(todo)
        if on_run is not None:
            on_run(found, run)
        if stop and (found.races or found.failures):
            break
    return found


def execute(program: Program, choices: str, *, bounds: Bounds | None = None) -> Execution:
    """The one run that makes ``choices``, then the first option of whatever is left to choose.

    Raises:
        ConfigError: A choice is none of the options at that place, or there are more than the run comes to.
    """
    script = Script(choices)
    run = _execute(program, script, bounds or Bounds(), {})
    if script.unused:
        raise ConfigError(
            f"choices {choices!r}: must be {len(run.made)} at most, the run has no more choice points "
            "(or the program, its options and the bounds are not those the choices come from)"
        )
    return run


class ListSink:
    """A ``RecordSink`` that is a list. Device times are not wanted: one schedule's times prove nothing."""

    writable = True
    mode = CaptureMode.OBSERVE

    def __init__(self) -> None:
        self.records: list[AnyRecord] = []

    def append(self, record: AnyRecord) -> bool:
        self.records.append(record)
        return True

    def drop(self, reason: DropReason, count: int = 1) -> None:
        assert reason is DropReason.UNRESOLVED, f"the recorder lost {count} records: {reason.name}"

    def beat(self, host_ns: int) -> None:
        """Nobody watches."""


class _Oracle:
    """Asks the script for the answers of queries."""

    def __init__(self, script: Script, max_false: int) -> None:
        self._script = script
        self._max_false = max_false
        self.known = 0
        self.bounded = 0

    def forced(self) -> None:
        self.known += 1

    def choose(self, item: Item) -> bool:
        if item.false_answers >= self._max_false:
            self.bounded += 1
            return True
        return self._script.choose(f"query of {item}", QUERY_OPTIONS) == "1"


def _execute(program: Program, script: Script, bounds: Bounds, checks: _Checks) -> Execution:
    oracle = _Oracle(script, bounds.max_false)
    turns = Turns(script, preemptions=bounds.preemptions, max_calls=bounds.max_calls)
    trace = ListSink()
    bare = VirtualDevice("lazy", oracle=oracle)
    recorder = Recorder(trace, clock=bare.host_ns, ranges=NoRanges(), max_pending=1)
    world = World(TurnDevice(bare, recorder, turns), recorder, turns)
    error = ""
    try:
        program(world)
        turns.finish()
        bare.close()
    except Stopped:
        assert turns.error is not None  # nothing else stops the main thread
        name, failed = turns.error
        error = _line(failed) if isinstance(failed, DeadlockError) else f"thread {name!r}: {_line(failed)}"
    except Exception as raised:  # noqa: BLE001 whatever the program raises is a result of this run
        error = _line(raised)
    finally:
        turns.close()
    if script.fault is not None:
        raise script.fault
    counters = recorder.counters
    assert not counters.errors, "the recorder failed, so this run proves nothing"
    assert not counters.uncertain, "a call was interrupted by another thread, though threads take turns"
    sink, lookups = _judge(trace.records)
    work = _digest(trace.records, work_only=True)
    if work not in checks:
        checks[work] = needs_order(trace.records)
    return Execution(
        choices=script.text,
        made=tuple(script.made),
        findings=tuple(sink.findings),
        error=error,
        records=tuple(trace.records),
        history=_digest(trace.records, work_only=False),
        work=work,
        checks=checks[work],
        weak=sink.weak.total(),
        lookups=lookups,
        forced=oracle.known,
        bounded_queries=oracle.bounded,
        bounded_turns=turns.bounded,
    )


_ORDERING: Final = (EventWait, WaitStream, EventSync, HostSync, EventQuery, ThreadRecv, RecordStream)
"""Without these every stream and thread is on its own: what then races is what they keep in order."""


def needs_order(records: Iterable[Record]) -> Counter[Hazard]:
    """Pairs of accesses by hazard that nothing but waits and observations of the host keeps in order."""
    unordered, _ = _judge(record for record in records if not isinstance(record, _ORDERING))
    return Counter(finding.hazard for finding in unordered.findings)


def _judge(records: Iterable[Record]) -> tuple[RecordingSink, int]:
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    return sink, analyzer.totals.lookups


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _digest(records: Iterable[Record], *, work_only: bool) -> bytes:
    """Of what the host did, or of the work it submitted; times, operation numbers and addresses left out."""
    digest = hashlib.blake2b(digest_size=16)
    for record in records:
        accesses = _accesses(record)
        if isinstance(record, Define | RecordStream) or (work_only and not accesses):
            continue
        plain = {
            name: getattr(record, name)
            for name in record.__struct_fields__
            if name not in ("op", "host_ns", "access", "accesses")
        }
        digest.update(f"{type(record).__name__}{plain}".encode())
        for access in accesses:
            digest.update(f"{access.space}{access.mode}{access.pool}".encode())
            digest.update(access.ids.tobytes())
    return digest.digest()


def _accesses(record: Record) -> tuple[Access, ...]:
    single: Access | None = getattr(record, "access", None)
    several: tuple[Access, ...] = getattr(record, "accesses", ())
    return several if single is None else (single,)
