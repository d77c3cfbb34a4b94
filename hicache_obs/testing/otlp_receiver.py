"""A real OTLP/gRPC receiver for tests: keeps what arrives, to the nanosecond, links and exemplars included.

Needs the packages of the extra ``otel``; they are imported when a receiver is made.
"""

from __future__ import annotations

import threading
from concurrent import futures
from typing import Any


class Receiver:
    """Listens from the start; ends with ``close``.

    Args:
        port: Of the loopback interface, 0 for any free one.

    Attributes:
        spans: In order of arrival, as OTLP has them.
        resources: Attributes of what sent them, one entry per sender and message.
        metrics: The newest of each name.
        exemplars: Of all exponential histograms.
        headers: Of each message of spans.
        accepting: Clear it, and every call waits until it is set again, for half a minute at most.
    """

    def __init__(self, port: int = 0) -> None:
        import grpc
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.metrics: dict[str, Any] = {}
        self.exemplars: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.accepting = threading.Event()
        self.accepting.set()
        mine = self

        class Traces(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 gRPC's name
                mine.accepting.wait(30)
                mine.headers.append(dict(context.invocation_metadata()))
                for group in request.resource_spans:
                    mine.resources.append({a.key: _value(a.value) for a in group.resource.attributes})
                    mine.spans += [span for scope in group.scope_spans for span in scope.spans]
                return trace_service_pb2.ExportTraceServiceResponse()

        class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 gRPC's name
                mine.accepting.wait(30)
                for group in request.resource_metrics:
                    for metric in (m for scope in group.scope_metrics for m in scope.metrics):
                        mine.metrics[metric.name] = metric
                        for point in metric.exponential_histogram.data_points:
                            mine.exemplars += point.exemplars
                return metrics_service_pb2.ExportMetricsServiceResponse()

        # Bounded, so that a slow receiver cannot keep more callers than it has threads for.
        self._server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), self._server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    @property
    def url(self) -> str:
        """Endpoint to send to."""
        return f"http://127.0.0.1:{self.port}"

    def named(self, name: str) -> list[Any]:
        """Spans called ``name``."""
        return [span for span in self.spans if span.name == name]

    def close(self) -> None:
        """Stop listening; blocks until all calls have ended."""
        self.accepting.set()
        self._server.stop(0).wait(10)


def _value(value: Any) -> Any:
    """The Python value of an OTLP attribute."""
    return getattr(value, value.WhichOneof("value"))
