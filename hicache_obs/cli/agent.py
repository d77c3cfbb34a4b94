"""``hicache-obs agent``: one process per node that reads, judges, keeps and exports what all ranks record."""

from __future__ import annotations

import logging
import os
import select
import signal
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from hicache_obs.cli.layout import fit
from hicache_obs.cli.outputs import Outputs, export_options, load_accepted, otlp_options
from hicache_obs.config import read_setting, read_text
from hicache_obs.errors import ConfigError
from hicache_obs.findings import ExitCode, Verdict, worst

if TYPE_CHECKING:
    from hicache_obs.agent import NodeAgent, NodeOptions
    from hicache_obs.analyzer import Analyzer
    from hicache_obs.analyzer.check import Totals
    from hicache_obs.analyzer.tally import Tally
    from hicache_obs.costs import AnalysisSink
    from hicache_obs.exporters.credentials import Credentials
    from hicache_obs.exporters.prometheus import Metrics
    from hicache_obs.exporters.server import Server
    from hicache_obs.records import Ranks

log = logging.getLogger("hicache_obs.agent")
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
REPORTED: Final = (Verdict.VIOLATION, Verdict.CONTRADICTION, Verdict.LATENT, Verdict.UNKNOWN)


@click.command("agent")
@click.option("--dir", "directory", type=click.Path(path_type=Path), metavar="DIR", help="Where the rings are.")
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", help="Port of /metrics, 0 for any free one.")
@click.option("--bind", metavar="ADDRESS", help="Local address of /metrics.")
@click.option("--journal", type=click.Path(path_type=Path), metavar="DIR", help="Keep all records, a folder per ring.")
@click.option(
    "--journal-max-bytes", type=click.IntRange(min=1 << 16), metavar="N",
    help="Size of the journals of one rank; the oldest records go first.",
)  # fmt: skip
@click.option(
    "--cpu-percent", type=click.IntRange(1, 100), metavar="N",
    help="Part of one core it may use; what it cannot judge in time is left out and counted.",
)  # fmt: skip
@export_options
@click.option("--tls-cert", type=click.Path(path_type=Path), metavar="FILE", help="Serve TLS with this certificate.")
@click.option("--tls-key", type=click.Path(path_type=Path), metavar="FILE", help="Its key.")
@click.option("--token-file", type=click.Path(path_type=Path), metavar="FILE", help="Ask for the bearer token in it.")
@click.option(
    "--basic-auth-file", type=click.Path(path_type=Path), metavar="FILE",
    help="Ask for a user and password: one of its lines user:password.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Read what is there, say what was found, and end; no port is opened.")
@click.option(
    "--textfile", type=click.Path(path_type=Path), metavar="FILE.prom",
    help="With --once: write the metrics to this file, for node exporter's textfile collector.",
)  # fmt: skip
def command(
    directory: Path | None,
    port: int | None,
    bind: str | None,
    journal: Path | None,
    journal_max_bytes: int | None,
    cpu_percent: int | None,
    accepted_file: Path | None,
    events: str | None,
    otlp: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    token_file: Path | None,
    basic_auth_file: Path | None,
    once: bool,
    textfile: Path | None,
) -> int:
    """Read the rings of all ranks on this node, and serve their metrics and a status page on one port.

    New rings are found while it runs; one agent reads a directory. SIGTERM ends it: what is in the rings is read
    and kept, exit code 0. Each option but the last two and --otlp has a variable that is its default, such as
    HICACHE_OBS_PORT (9464); 'hicache-obs doctor' lists them.
    """
    if once and directory is not None and not directory.exists():
        raise ConfigError(f"--dir {directory}: No such file or directory; has an observed process run here?")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="hicache-obs agent: %(message)s", force=True)
    options = _options(directory, journal, journal_max_bytes, cpu_percent)
    if textfile is not None and not once:
        raise ConfigError(f"--textfile {textfile}: needs --once; a running agent is scraped on its port")
    security = None if once else _security(tls_cert, tls_key, token_file, basic_auth_file)
    accepted, sent = load_accepted(accepted_file), otlp_options(otlp)
    from hicache_obs.exporters.prometheus import Metrics

    metrics = Metrics(ranks=(), engine="agent")
    with closing(Outputs(accepted, events=events, otlp=sent, metrics=metrics)) as outputs:
        if security is None:
            return int(_read_once(options, metrics, outputs, textfile))
        _serve(replace(options, scraped=True), metrics, outputs, port, bind, security)
    return int(ExitCode.CLEAN)


def _options(
    directory: Path | None, journal: Path | None, max_bytes: int | None, cpu_percent: int | None
) -> NodeOptions:
    from hicache_obs.agent import NodeOptions

    if journal is None and read_text("journal")[0]:
        journal = Path(read_text("journal")[0])
    if journal is not None:
        _check_journal(journal)
    return NodeOptions(
        directory=Path(read_text("ring_dir")[0]) if directory is None else directory,
        journals=journal,
        journal_max_bytes=read_setting("journal_max_bytes")[0] if max_bytes is None else max_bytes,
        period_s=read_setting("poll_ms")[0] / 1e3,
        cpu_share=(read_setting("agent_cpu_percent")[0] if cpu_percent is None else cpu_percent) / 100,
        keep=read_text("finished")[0] == "keep",
        finished_rings=read_setting("finished_rings")[0],
    )


def _check_journal(directory: Path) -> None:
    """Refuse a directory now that would fail at the first record."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(None, "Permission denied")
    except OSError as error:
        raise ConfigError(
            f"--journal {directory}: {error.strerror}; name a directory this process can write to"
        ) from None


@dataclass(frozen=True, slots=True)
class _Security:
    """Who may read the port."""

    tls: ssl.SSLContext | None
    credentials: Credentials | None


def _security(cert: Path | None, key: Path | None, token: Path | None, users: Path | None) -> _Security:
    from hicache_obs.exporters.credentials import read_certificate, read_credentials

    cert, key = _file("tls_cert", cert), _file("tls_key", key)
    token, users = _file("token_file", token), _file("basic_auth_file", users)
    return _Security(read_certificate(cert, key), read_credentials(token, users))


def _file(setting: str, option: Path | None) -> Path | None:
    """The option, else the setting; ``None`` without either."""
    text = "" if option is not None else read_text(setting)[0]
    return Path(text) if text else option


def _warn(server: Server, security: _Security) -> None:
    """Say what a port that other machines can reach gives away."""
    if not server.exposed:
        return
    if security.credentials is None:
        log.warning(
            "%s can be read by whoever reaches it: set --token-file or --basic-auth-file, or bind to 127.0.0.1",
            server.home,
        )
    elif security.tls is None:
        log.warning("%s: credentials travel in clear text: set --tls-cert and --tls-key", server.home)


def _serve(
    options: NodeOptions, metrics: Metrics, outputs: Outputs, port: int | None, bind: str | None, security: _Security
) -> None:
    from hicache_obs.exporters.endpoint import serve

    address = read_text("bind")[0] if bind is None else bind
    number = read_setting("port")[0] if port is None else port
    journal = "" if options.journals is None else str(options.journals.absolute())
    with (
        _wait_for_signals() as wait,
        _agent(options, metrics, outputs) as agent,
        serve(
            metrics,
            board=agent.board,
            accepted=outputs.accepted,
            address=address,
            port=number,
            option="--bind, --port",
            tls=security.tls,
            credentials=security.credentials,
            created=read_text("created")[0] == "on",
            facts={"rings": str(options.directory), "journals": journal or "none", "process": str(os.getpid())},
            scraped=agent.scraped,
            healthy=agent.stuck,
            ready=agent.stuck,
        ) as server,
    ):
        _warn(server, security)
        agent.describe(url=server.url, journal=journal)
        click.echo(f"reading the rings in {options.directory}, metrics at {server.url}\nstatus page at {server.home}")
        sys.stdout.flush()

        def pause(seconds: float) -> bool:
            outputs.idle()
            return wait(seconds)

        agent.run(pause)


@contextmanager
def _agent(
    options: NodeOptions,
    metrics: Metrics,
    outputs: Outputs,
    more: Callable[[Ranks, Analyzer], Sequence[AnalysisSink]] = lambda _rank, _analyzer: (),
) -> Iterator[NodeAgent]:
    from hicache_obs.agent import NodeAgent

    accepts = outputs.accepted.covers
    agent = NodeAgent(options, metrics, more_sinks=more, follow=outputs.follow, accepts=accepts)
    try:
        yield agent
    except ConfigError:  # such as a port that is taken
        agent.close(take_in=False)
        raise
    finally:
        agent.close()


@contextmanager
def _wait_for_signals() -> Iterator[Callable[[float], bool]]:
    """A function that waits for so many seconds and returns True if one of ``SIGNALS`` has come.

    The handler only writes to a pipe: it may interrupt anything, a lock that an event would need among it.
    """
    ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {name: signal.signal(name, lambda *_: _wake(ends[1])) for name in SIGNALS}
    try:
        yield lambda seconds: bool(select.select([ends[0]], [], [], seconds)[0])
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
        for end in ends:
            os.close(end)


def _wake(end: int) -> None:
    try:
        os.write(end, b"!")
    except BlockingIOError:
        pass  # so many signals that the pipe is full: it is awake


@dataclass(frozen=True, slots=True)
class _Read:
    """What one ring gave.

    Attributes:
        before: What an agent before this one had seen of it.
    """

    rank: Ranks
    analyzer: Analyzer
    before: Totals
    tally: Tally

    @property
    def lookups(self) -> int:
        return self.analyzer.totals.lookups - self.before.lookups


def _read_once(options: NodeOptions, metrics: Metrics, outputs: Outputs, textfile: Path | None) -> ExitCode:
    from hicache_obs.analyzer.tally import Tally
    from hicache_obs.exporters.textfile import check_textfile, write_textfile

    if textfile is not None:
        check_textfile(textfile)
    found: list[_Read] = []

    def listen(rank: Ranks, analyzer: Analyzer) -> list[AnalysisSink]:
        found.append(_Read(rank, analyzer, replace(analyzer.totals), Tally()))
        return [found[-1].tally]

    with _agent(options, metrics, outputs, listen) as agent:
        agent.drain()
        blind = agent.blind
    if textfile is not None:
        write_textfile(metrics, textfile)
    if not found and not blind:
        click.echo(f"no rings to read in {options.directory}")
        return ExitCode.NOTHING_CHECKED
    for read in found:
        click.echo(fit(_summary(read), indent=4))
    codes = [read.tally.exit_code(read.lookups, accepts=outputs.accepted.covers) for read in found]
    if ExitCode.FINDINGS in codes:
        click.echo(fit(f"to have them explained: hicache-obs check {_kept(options)}", indent=4))
    return worst([*codes, *(ExitCode.NOTHING_CHECKED for _ in blind)])


def _kept(options: NodeOptions) -> str:
    """Where the records are that were read, as patterns of the shell."""
    from hicache_obs.agent.node import FINISHED
    from hicache_obs.recorder.ring_directory import list_rings

    if options.journals is not None:
        return f"{options.journals}/*"
    folders = (options.directory, options.directory / FINISHED)
    return " ".join(f"{folder}/*.ring" for folder in folders if folder.is_dir() and list_rings(folder))


def _summary(read: _Read) -> str:
    rank, records = read.rank, read.analyzer.totals.records - read.before.records
    verdicts = ", ".join(f"{read.tally.verdicts[verdict]} {verdict.value}" for verdict in REPORTED)
    return (
        f"dp{rank.dp} pp{rank.pp} tp{rank.tp}: {records} records, {sum(read.tally.lost.values())} lost, "
        f"{read.lookups} page pairs checked; operation pairs: {verdicts}"
    )
