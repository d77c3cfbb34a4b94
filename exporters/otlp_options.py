"""Where and how OTLP is sent: the standard ``OTEL_*`` variables, a flag, and the exporters they ask for.

Source of names and defaults: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/ and
https://opentelemetry.io/docs/specs/otel/protocol/exporter/. Headers, timeouts, compression and certificates are read
by the exporters themselves.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from hicache_obs import __version__
from hicache_obs.config import read_setting, refuse_password
from hicache_obs.errors import ConfigError
from hicache_obs.records import Ranks

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

PROTOCOLS: Final = ("grpc", "http/protobuf")
ENDPOINTS: Final = {
    "traces": ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    "metrics": ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
}
INSTALL: Final = "pip install 'hicache-obs[otel]'"
MAX_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True)
class OtlpOptions:
    """What to send, and how.

    Attributes:
        endpoint: Of the flag; empty where the variables say it.
        protocols: ``grpc`` or ``http/protobuf`` by signal, ``traces`` and ``metrics``; a signal that is off is absent.
        one_in: Traces without a finding that are sent: one in so many.
        queue: Spans that wait to be sent, at most.
        batch: Spans in one message.
        delay_s: How long spans are collected for one.
        metrics_every_s: Time between two messages of metrics.
    """

    endpoint: str
    protocols: Mapping[str, str]
    one_in: int
    queue: int
    batch: int
    delay_s: float
    metrics_every_s: float

    def span_exporter(self) -> SpanExporter:
        """A new exporter of traces.

        Raises:
            ConfigError: The packages are not installed, or a variable cannot be used.
        """
        if self.protocols["traces"] == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter(endpoint=self.endpoint or None)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=self._url("traces"))

    def metric_exporter(self) -> MetricExporter:
        """A new exporter of metrics, see ``span_exporter``."""
        if self.protocols["metrics"] == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

            return GrpcExporter(endpoint=self.endpoint or None)
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

        return HttpExporter(endpoint=self._url("metrics"))

    def _url(self, signal: str) -> str | None:
        return f"{self.endpoint.rstrip('/')}/v1/{signal}" if self.endpoint else None


def read_options(endpoint: str | None, environment: Mapping[str, str]) -> OtlpOptions | None:
    """What flag and environment ask for; ``None`` if neither asks for OTLP, or ``OTEL_SDK_DISABLED`` is ``true``.

    Args:
        endpoint: ``--otlp``, an address like ``http://127.0.0.1:4317``; it wins over the variables.

    Raises:
        ConfigError: A value that is not allowed.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    named = {
        signal: [environment[name] for name in names if environment.get(name)] for signal, names in ENDPOINTS.items()
    }
    if not endpoint and not any(named.values()):
        return None
    if endpoint:
        _check_address(endpoint)
    protocols = {
        signal: _protocol(signal, environment)
        for signal, addresses in named.items()
        if (endpoint or addresses) and _is_on(signal, environment)
    }
    if not protocols:
        return None
    queue = read_setting("span_queue", environment)[0]
    return OtlpOptions(
        endpoint=endpoint or "",
        protocols=protocols,
        one_in=read_setting("span_one_in", environment)[0],
        queue=queue,
        batch=min(queue, _number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512, environment, high=1 << 16)),
        delay_s=_number("OTEL_BSP_SCHEDULE_DELAY", 1000, environment) / 1e3,
        metrics_every_s=_number("OTEL_METRIC_EXPORT_INTERVAL", 60_000, environment) / 1e3,
    )


def require_exporters() -> None:
    """Make sure that the OTLP exporters are there, and let them log nothing: failures are counted and told here.

    Raises:
        ConfigError: They are not installed.
    """
    try:
        import opentelemetry.exporter.otlp.proto.grpc
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401 only whether they are there
    except ImportError as error:
        raise ConfigError(f"--otlp: OTLP exporters are not installed ({error.name} is missing); {INSTALL}") from None
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL + 1)


def resource(rank: Ranks, engine: str, *, run: str = "") -> Resource:
    """What sends a rank's telemetry. ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` win over what is here.

    Args:
        engine: Name and version of the observed engine, empty if unknown.
        run: What the process was doing, if it did several things in turn.
    """
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    host = socket.gethostname()
    own: dict[str, str | int] = {
        "service.name": "hicache-obs",
        "service.version": __version__,
        "service.instance.id": f"{host}:dp{rank.dp}-pp{rank.pp}-tp{rank.tp}",
        "host.name": host,
        "hicache.tp_rank": rank.tp,
        "hicache.pp_rank": rank.pp,
        "hicache.dp_rank": rank.dp,
        **({"hicache.engine": engine} if engine else {}),
        **({"hicache.run": run} if run else {}),
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())


def _is_on(signal: str, environment: Mapping[str, str]) -> bool:
    name = f"OTEL_{signal.upper()}_EXPORTER"
    chosen = [word.strip() for word in environment.get(name, "otlp").split(",")]
    if not {"otlp", "none"}.intersection(chosen):
        raise ConfigError(f"{name}: {environment[name]!r}; expected otlp or none")
    return "otlp" in chosen


def _protocol(signal: str, environment: Mapping[str, str]) -> str:
    for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        chosen = environment.get(name)
        if chosen:
            if chosen not in PROTOCOLS:
                raise ConfigError(f"{name}: {chosen!r}; expected {' or '.join(PROTOCOLS)}")
            return chosen
    return PROTOCOLS[0]


def _number(name: str, default: int, environment: Mapping[str, str], *, high: int = MAX_MS) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or not 1 <= int(text) <= high:
        raise ConfigError(f"{name}: {text!r}; expected an integer from 1 to {high}")
    return int(text)


def _check_address(endpoint: str) -> None:
    refuse_password(endpoint, "--otlp", instead="put them in OTEL_EXPORTER_OTLP_HEADERS", anywhere=True)
    try:
        parts = urlsplit(endpoint)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        fine = False
    if not fine:
        raise ConfigError(f"--otlp {endpoint}: not an address; expected http://HOST:PORT or https://HOST:PORT")
