"""OTLP export of one process: spans and metrics of all ranks, sent by threads of its own.

The thread that analyses only builds spans and puts them into a bounded queue. A dead or slow endpoint therefore costs
it nothing: what does not fit is dropped, ordinary traces first, and counted. After a fork the child sends nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from hicache_obs import __version__
from hicache_obs.costs import FenceCost, Ignore, TransferCost
from hicache_obs.errors import ConfigError
from hicache_obs.exporters.catalogue import Phase, SpanOutcome
from hicache_obs.exporters.metrics_sink import VERDICT_COUNTERS
from hicache_obs.exporters.otlp_metrics import SCOPE, Durations, OtlpMetrics
from hicache_obs.exporters.otlp_options import OtlpOptions, require_exporters, resource
from hicache_obs.exporters.prometheus import Metrics
from hicache_obs.exporters.rank_metrics import SPAN_ID, TRACE_ID, Exemplar
from hicache_obs.exporters.span_builder import SpanBuilder
from hicache_obs.exporters.span_queue import SpanQueue
from hicache_obs.exporters.spans import ORDERING_FINDING, Event, Link, Span, SpanId
from hicache_obs.findings import Finding, Verdict
from hicache_obs.records import AnyRecord, Ranks

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Link as OtelLink
    from opentelemetry.trace import SpanContext

LOG: Final = logging.getLogger("hicache_obs.otlp")
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
"""Between two tries after a failure; it doubles from the first."""
CLOSE_S: Final = 5.0
_QUIET_S: Final = 60.0
_IDLE_S: Final = 1.0
"""A ring that is silent for so long gives up waiting for later findings about its traces."""


Exporter = TypeVar("Exporter", "SpanExporter", "MetricExporter")


class _Queued(NamedTuple):
    """A span and the ring that it came from."""

    span: Span
    ring: RingSpans


class _Sender(NamedTuple):
    """A thread that sends, and what ends it."""

    stop: threading.Event
    thread: threading.Thread
    exporter: SpanExporter | MetricExporter


class Telemetry:
    """Sends what all ranks of this process do; ends with ``close``.

    Args:
        options: Where and how.
        metrics: Sent as they are; the counters of spans are kept in it.
        accepts: See ``MetricsSink``: an accepted finding has no exemplar.
        pauses: First and longest pause after a failure, seconds.

    Raises:
        ConfigError: The exporters are not installed, or a variable cannot be used.
    """

    def __init__(
        self,
        options: OtlpOptions,
        metrics: Metrics,
        *,
        accepts: Callable[[str], bool] = lambda _: False,
        pauses: tuple[float, float] = (FIRST_PAUSE_S, LONGEST_PAUSE_S),
    ) -> None:
        require_exporters()
        self.options: Final = options
        self.metrics: Final = metrics
        self.accepts: Final = accepts
        self.queue: Final = SpanQueue[_Queued](options.queue, lambda queued: queued.ring.count(SpanOutcome.QUEUE_FULL))
        self._pid = os.getpid()
        self._pauses = pauses
        self._durations: dict[Ranks, Durations] = {}
        self._rings: list[RingSpans] = []
        self._engines: dict[Ranks, str] = {}
        self._stop = threading.Event()
        self._spans_over = threading.Event()
        self._said_at = float("-inf")
        self._senders: list[_Sender] = []
        if "traces" in options.protocols:
            self._start("spans", self._stop, self._send_spans, options.span_exporter)
        if "metrics" in options.protocols:
            self._start("metrics", self._spans_over, self._send_metrics, options.metric_exporter)

    def _start(
        self, what: str, stop: threading.Event, send: Callable[[Exporter], None], make: Callable[[], Exporter]
    ) -> None:
        try:
            exporter = make()
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"OTEL_EXPORTER_OTLP_* for {what}: {error}; see docs/otel.md") from None
        thread = threading.Thread(target=send, args=(exporter,), name=f"hicache-obs-{what}", daemon=True)
        self._senders.append(_Sender(stop, thread, exporter))
        thread.start()

    @property
    def here(self) -> bool:
        """False in a child of ``fork``: the threads, and the queue's lock perhaps, are the parent's."""
        return os.getpid() == self._pid

    def ring(
        self, rank: Ranks, key: str, *, to_wall_ns: int, findings: bool = True, costs: bool = True, run: str = ""
    ) -> RingSpans:
        """A listener for one ring.

        Args:
            key: Names the ring for good.
            to_wall_ns: What to add to a host clock reading to get Unix time.
            findings: Make spans the exemplars of its findings, which the metrics count.
            costs: Record durations, and make spans their exemplars; else the metrics leave this ring's costs out.
            run: See ``otlp_options.resource``.
        """
        if rank not in self._durations:
            self._durations = {**self._durations, rank: Durations(self.metrics, rank)}
        durations = self._durations[rank] if costs else None
        builder = SpanBuilder(key, to_wall_ns=to_wall_ns, one_in=self.options.one_in)
        made = RingSpans(self, rank, builder, durations, findings=findings, run=run)
        self._rings.append(made)
        return made

    def leave(self, ring: RingSpans) -> None:
        """A ring is over."""
        if ring in self._rings:
            self._rings.remove(ring)

    def idle(self) -> None:
        """Hand on what silent rings keep back; on the thread that feeds them, now and then."""
        for ring in self._rings:
            ring.idle()

    def note_engine(self, rank: Ranks, engine: str) -> None:
        """State which engine a rank runs."""
        self._engines[rank] = engine

    def close(self, *, within_s: float = CLOSE_S) -> None:
        """Send what is left, for ``within_s`` at most; the rest is counted as undelivered. Idempotent."""
        if not self.here:
            return
        for ring in list(self._rings):
            ring.on_batch((), last=True)
        self.queue.close()
        deadline = time.monotonic() + within_s
        for sender in self._senders:  # metrics last: they have the exemplars of the last spans
            sender.stop.set()
            sender.thread.join(max(0.0, deadline - time.monotonic()))
        for sender in self._senders:
            sender.exporter.shutdown()
        for sender in self._senders:
            sender.thread.join(1.0)
        self._senders.clear()
        self._undelivered(self.queue.take(self.options.queue))

    # -- the sending threads ---------------------------------------------------------------------------------

    def _send_spans(self, exporter: SpanExporter) -> None:
        first_s, longest_s = self._pauses
        pause_s = 0.0
        while True:
            self._stop.wait(pause_s or self.options.delay_s)
            while batch := self.queue.take(self.options.batch):
                sent = self._send(exporter, batch)
                pause_s = 0.0 if sent else min(longest_s, 2 * pause_s or first_s)
                if not sent:
                    break
            if self._stop.is_set() and (pause_s or not len(self.queue)):
                return

    def _send(self, exporter: SpanExporter, batch: Sequence[_Queued]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        start_ns = time.thread_time_ns()
        try:
            sent = exporter.export([_readable(q.span, q.ring.resource()) for q in batch]) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 whatever a transport raises, the next batch is tried
            self._complain(f"{type(error).__name__}: {error}")
            sent = False
        if sent:
            for queued in batch:
                queued.ring.delivered(queued.span)
        else:
            self._complain("spans were refused, or nobody listens")
            refused = self.queue.put_back([queued for queued in batch if queued.span.kept])
            self._undelivered([*(queued for queued in batch if not queued.span.kept), *refused])
        self.metrics.add_overhead(Phase.EXPORT, time.thread_time_ns() - start_ns, batch[0].ring.rank)
        return sent

    def _undelivered(self, spans: Sequence[_Queued]) -> None:
        for queued in spans:
            queued.ring.count(SpanOutcome.UNDELIVERED)

    def _send_metrics(self, exporter: MetricExporter) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        source = OtlpMetrics(
            self.metrics,
            lambda rank: self._durations.get(rank),
            lambda rank: resource(rank, self._engines.get(rank, "")),
        )
        over = False
        while not over:
            over = self._spans_over.wait(self.options.metrics_every_s)
            try:
                if exporter.export(source.collect()) is not MetricExportResult.SUCCESS:
                    self._complain("metrics were refused, or nobody listens")
            except Exception as error:  # noqa: BLE001 see _send
                self._complain(f"{type(error).__name__}: {error}")

    def _complain(self, what: str) -> None:
        """Log what went wrong, once a minute; never an address or a header."""
        if time.monotonic() >= self._said_at + _QUIET_S:
            self._said_at = time.monotonic()
            LOG.warning("OTLP export fails (%s); going on, drops are counted in hicache_obs_spans_total", what)


class RingSpans(Ignore):
    """Spans and durations of one ring on their way out; made by ``Telemetry.ring``. Fed by one thread.

    An error in here switches the spans of this ring off, and harms nobody else.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        rank: Ranks,
        builder: SpanBuilder,
        durations: Durations | None,
        *,
        findings: bool,
        run: str,
    ) -> None:
        self.rank: Final = rank
        self._telemetry = telemetry
        self._builder = builder
        self._durations = durations
        self._explains = findings
        self._run = run
        self._counters = {
            outcome: telemetry.metrics.rank(rank).counter("spans_total", outcome.value) for outcome in SpanOutcome
        }
        self._findings: list[Finding] = []
        self._fences: list[FenceCost] = []
        self._transfers: list[TransferCost] = []
        self._sampled_out = 0
        self._fed_at = time.monotonic()
        self._resources: dict[str, Resource] = {}
        self._over = False

    # -- AnalysisSink, as far as spans need it ---------------------------------------------------------------

    def on_finding(self, finding: Finding) -> None:
        """Keep one finding until the records of its batch are built."""
        self._findings.append(finding)

    def on_fence(self, cost: FenceCost) -> None:
        """Keep one fence's cost likewise."""
        self._fences.append(cost)
        if self._durations is not None:
            self._durations.on_fence(cost)

    def on_layer_wait(self, waited_ns: int) -> None:
        """Record one layer wait."""
        if self._durations is not None:
            self._durations.on_layer_wait(waited_ns)

    def on_transfer(self, cost: TransferCost) -> None:
        """Keep one transfer's cost likewise."""
        self._transfers.append(cost)
        if self._durations is not None:
            self._durations.on_transfer(cost)

    # -- Follower --------------------------------------------------------------------------------------------

    def on_batch(self, records: Sequence[AnyRecord], *, last: bool) -> None:
        """``records`` were analysed: build their spans, and queue those of traces that are over."""
        self._fed_at = time.monotonic()
        if not self._over:
            try:
                self._take(records, last=last)
            except Exception as error:  # noqa: BLE001 spans must not end the analysis
                self._over = True
                LOG.warning("spans of rank %s are off (%s: %s)", self.rank, type(error).__name__, error)
        self._findings, self._fences, self._transfers = [], [], []
        if last:
            self._telemetry.leave(self)

    def idle(self) -> None:
        """Queue what is complete if nothing has come for a while."""
        if not self._over and time.monotonic() >= self._fed_at + _IDLE_S:
            self._fed_at = time.monotonic()
            self._put(self._builder.release(complete=True))

    def _take(self, records: Sequence[AnyRecord], *, last: bool) -> None:
        builder, observed = self._builder, self._durations is not None
        builder.feed(records)
        for finding in self._findings:
            builder.note_finding(finding)
        for fence in self._fences:
            builder.note_fence(fence, observed=observed)
        for transfer in self._transfers:
            builder.note_transfer(transfer, observed=observed)
        if builder.engine:
            self._telemetry.note_engine(self.rank, builder.engine)
        self._put(builder.release(everything=last))

    def _put(self, traces: Sequence[Sequence[Span]]) -> None:
        builder = self._builder
        self._counters[SpanOutcome.SAMPLED_OUT].add(builder.sampled_out - self._sampled_out)
        self._sampled_out = builder.sampled_out
        if not self._telemetry.here or "traces" not in self._telemetry.options.protocols:
            return
        for spans in traces:
            self._telemetry.queue.put([_Queued(span, self) for span in spans], kept=spans[0].kept)

    # -- for the sending thread ------------------------------------------------------------------------------

    def count(self, outcome: SpanOutcome) -> None:
        """Count one span; each outcome is counted by one thread."""
        self._counters[outcome].add()

    def delivered(self, span: Span) -> None:
        """``span`` has arrived: what it explains has an exemplar from now on."""
        self._counters[SpanOutcome.EXPORTED].add()
        ids = {TRACE_ID: f"{span.id.trace:032x}", SPAN_ID: f"{span.id.span:016x}"}
        if span.observation is not None and self._durations is not None:
            self._durations.explain(span, span.observation, Exemplar(ids, time.time_ns()))
        for event in span.events:
            if self._explains and event.name == ORDERING_FINDING:
                self._explain_finding(event, ids)

    def _explain_finding(self, event: Event, ids: Mapping[str, str]) -> None:
        fingerprint, hazard, verdict = (
            str(event.attributes[f"hicache.{name}"]) for name in ("fingerprint", "hazard", "verdict")
        )
        counter = VERDICT_COUNTERS.get(Verdict(verdict))
        if counter is not None and not self._telemetry.accepts(fingerprint):
            exemplar = Exemplar({"fingerprint": fingerprint, **ids}, time.time_ns())
            self._telemetry.metrics.rank(self.rank).explain(counter, hazard, amount=1, exemplar=exemplar)

    def resource(self) -> Resource:
        """What sends this ring's spans."""
        engine = self._builder.engine
        if engine not in self._resources:
            self._resources = {engine: resource(self.rank, engine, run=self._run)}
        return self._resources[engine]


def _readable(span: Span, sent_by: Resource) -> ReadableSpan:
    """``span`` as OpenTelemetry's exporters take it, with the nanoseconds it has."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link as OtelLink
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.status import Status, StatusCode

    return ReadableSpan(
        name=span.name,
        context=_context(span.id),
        parent=_context(SpanId(span.id.trace, span.parent)) if span.parent else None,
        resource=sent_by,
        attributes=span.attributes,
        events=[Event(event.name, event.attributes, event.time_ns) for event in span.events],
        links=[_link(link, OtelLink) for link in span.links],
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, "ordering violated") if span.failed else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope(SCOPE, __version__),
    )


def _link(link: Link, kind: type[OtelLink]) -> OtelLink:
    return kind(_context(link.to, remote=link.what == "request"), {"hicache.link": link.what})


def _context(place: SpanId, *, remote: bool = False) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(place.trace, place.span, is_remote=remote, trace_flags=TraceFlags(TraceFlags.SAMPLED))
