"""Where findings and costs go besides the metrics: JSON lines, OTLP; and which findings are accepted. For flags."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hicache_obs.config import read_setting, read_text
from hicache_obs.exporters.accepted import Accepted, read_accepted

if TYPE_CHECKING:
    from hicache_obs.agent import Follower, WatchedRing
    from hicache_obs.exporters.events import EventLog
    from hicache_obs.exporters.otel import Telemetry
    from hicache_obs.exporters.otlp_options import OtlpOptions
    from hicache_obs.exporters.prometheus import Metrics

Command = TypeVar("Command", bound=Callable[..., Any])


def accepted_option(command: Command) -> Command:
    """``--accepted FILE``."""
    return click.option(
        "--accepted", "accepted_file", type=click.Path(path_type=Path), metavar="FILE",
        help="Findings that are expected for now: TOML, a table per fingerprint with reason and expires.",
    )(command)  # fmt: skip


def rank_option(command: Command) -> Command:
    """``--rank N``, for folders that hold the records of several ranks."""
    return click.option(
        "--rank", type=click.IntRange(min=0), metavar="N", help="Which rank of a folder that holds several."
    )(command)


def export_options(command: Command) -> Command:
    """``--accepted FILE``, ``--events FILE`` and ``--otlp URL``."""
    command = click.option(
        "--otlp", metavar="URL",
        help="Send spans and metrics to this OTLP endpoint; the OTEL_* variables say how, and where by default.",
    )(command)  # fmt: skip
    command = click.option("--events", metavar="FILE|-", help="Write findings as JSON lines; - is standard output.")(
        command
    )
    return accepted_option(command)


def load_accepted(path: Path | None) -> Accepted:
    """The acceptances of the flag or the setting; says which have expired.

    Raises:
        ConfigError: The file is not what it should be.
    """
    name = str(path) if path is not None else read_text("accepted")[0]
    if not name:
        return Accepted()
    accepted = read_accepted(Path(name))
    for line in accepted.expired():
        click.echo(f"hicache-obs: {name}: {line}", err=True)
    return accepted


def otlp_options(endpoint: str | None, *, use_environment: bool = True) -> OtlpOptions | None:
    """What ``--otlp`` and the environment ask for; ``None`` for no OTLP.

    Raises:
        ConfigError: See ``read_options``.
    """
    if not endpoint and not (use_environment and any(name.startswith("OTEL_EXPORTER_OTLP") for name in os.environ)):
        return None
    from hicache_obs.exporters.otlp_options import read_options

    return read_options(endpoint, os.environ)


class Outputs:
    """Everything a run writes to or sends to; ends with ``close``. One thread at a time.

    Args:
        accepted: Findings that are expected.
        events: ``--events``; the setting if it is ``None`` and ``use_settings``.
        otlp: What ``otlp_options`` gave.
        metrics: Sent by OTLP, and told about spans.
        use_settings: A flag that is absent is looked up in the settings.

    Raises:
        ConfigError: A file or endpoint cannot be used.
    """

    def __init__(
        self,
        accepted: Accepted,
        *,
        events: str | None,
        otlp: OtlpOptions | None,
        metrics: Metrics,
        use_settings: bool = True,
    ) -> None:
        self.accepted = accepted
        self.events: EventLog | None = None
        self.telemetry: Telemetry | None = None
        target = read_text("events")[0] if events is None and use_settings else events
        if target:
            from hicache_obs.exporters.events import EventLog, LineFile

            file = LineFile(None if target == "-" else Path(target), max_bytes=read_setting("events_max_bytes")[0])
            self.events = EventLog(file, accepted=accepted, interval_s=read_setting("events_interval_s")[0])
        if otlp is not None:
            from hicache_obs.exporters.otel import Telemetry

            self.telemetry = Telemetry(otlp, metrics, accepts=accepted.covers)

    def follow(
        self, ring: WatchedRing, *, events: bool = True, costs: bool = True, run: str = "", replay: str = ""
    ) -> list[Follower]:
        """The listeners of one ring.

        Args:
            events: Write its findings, and make spans their exemplars.
            costs: See ``Telemetry.ring``.
            run: See ``Telemetry.ring``.
            replay: What a user does to see a finding again; by default with the journal, or a copy of the ring.
        """
        info = ring.info
        followers: list[Follower] = []
        if self.events is not None and events:
            if not replay and ring.journal is not None:
                replay = f"hicache-obs replay {ring.journal}"
            replay = replay or f"copy {ring.path}, then hicache-obs replay on the copy"
            followers.append(self.events.ring(info.ranks, ring.analyzer, to_wall_ns=info.to_wall_ns(0), replay=replay))
        if self.telemetry is not None:
            key = f"{ring.path.name} {info.wall_ns} {info.host_ns} {info.pid} {info.ranks}"
            wall_ns = info.to_wall_ns(0)
            followers.append(
                self.telemetry.ring(info.ranks, key, to_wall_ns=wall_ns, findings=events, costs=costs, run=run)
            )
        return followers

    def idle(self) -> None:
        """Write and send what is due although nothing new has come; on the thread that feeds the followers."""
        if self.events is not None:
            self.events.flush()
        if self.telemetry is not None:
            self.telemetry.idle()

    def close(self) -> None:
        """Write and send the rest."""
        if self.telemetry is not None:
            self.telemetry.close()
        if self.events is not None:
            self.events.flush(everything=True)


def made_up_traceparent(*parts: object) -> str:
    """A W3C trace context that is the same for the same parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=24).hexdigest()
    return f"00-{digest[:32]}-{digest[32:]}-01"
