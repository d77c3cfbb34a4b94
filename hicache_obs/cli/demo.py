"""``hicache-obs demo``: the whole path on one real engine, from recorded streams to a verdict."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hicache_obs.analyzer import explain
from hicache_obs.cli.demo_policies import FENCES, DemoPolicies, policy_options
from hicache_obs.cli.json_file import writable_json, write_json
from hicache_obs.cli.layout import FINDING_INDENT, fit, progress_bars
from hicache_obs.cli.outputs import Outputs, export_options, load_accepted, otlp_options
from hicache_obs.cli.rank_flags import RankFlags, rank_flags
from hicache_obs.config import read_text
from hicache_obs.errors import ConfigError
from hicache_obs.findings import Verdict

if TYPE_CHECKING:
    from hicache_obs.cli.demo_run import DemoOptions, ModeResult
    from hicache_obs.controller.workloads import Request
    from hicache_obs.exporters.accepted import Accepted
    from hicache_obs.exporters.findings_board import FindingsBoard
    from hicache_obs.exporters.prometheus import Metrics
    from hicache_obs.exporters.server import Server

SCHEDULES: Final = ("eager", "lazy", "random", "adversarial")
KV_LAYOUTS: Final = ("mha", "mla", "fp8", "swa", "hybrid")
HYBRID_LAYERS: Final = 3
"""One of each kind."""
HOST_LAYOUTS: Final = ("layer-first", "page-first", "page-first-direct")
IO_BACKENDS: Final = ("kernel", "direct")
DEVICES: Final = ("auto", "cuda", "threads", "virtual")
DEFAULT_PORT: Final = 9464
VOCABULARY: Final = 512

ROWS: Final = (
    "rounds",
    "restored pages",
    "pages checked",
    "violations (operation pairs)",
    "latent races",
    "corrupted pages (by content)",
    "wrong requests",
    "fences",
    "fence wait p50 (ms)",
    "fence wait p99 (ms)",
    "avoidable wait, all fences (ms)",
    "throughput (tokens/s)",
)


class _Defaults:
    """Sizes per runner: small enough to show pressure on the device pool, large enough for many restores."""

    def __init__(self, runner: str, *, real: bool) -> None:
        pattern = runner == "pattern"
        self.page_size = 512 if pattern else 16
        self.requests = 400 if pattern else 160
        self.device_pages = 1024 if pattern and real else 128 if pattern else 48
        self.host_pages = 16 * self.device_pages
        self.layers = 2 if pattern else 4
        self.heads, self.head_dim = (1, 1) if pattern else (2, 16)
        self.max_running = 32 if pattern else 8


@click.command("demo")
@click.option(
    "--fence", type=click.Choice([*FENCES, "all"]), default="all", show_default=True,
    help="What a transfer waits for: nothing, the whole forward stream, or the rounds that use its pages.",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(DEVICES), default="auto", show_default=True,
    help="Where streams run: a GPU, worker threads, or a deterministic virtual device. auto: cuda, else threads.",
)  # fmt: skip
@click.option(
    "--schedule", type=click.Choice(SCHEDULES), default="adversarial", show_default=True,
    help="When the virtual device runs queued work.",
)  # fmt: skip
@click.option(
    "--runner", type=click.Choice(["transformer", "pattern"]), default="transformer", show_default=True,
    help="A small real model, or page contents at memory speed for large workloads.",
)  # fmt: skip
@click.option(
    "--workload", type=click.Path(path_type=Path), metavar="FILE.jsonl",
    help="Requests to run, one JSON object per line with input_length, output_length and hash_ids; "
    "default: generated conversations.",
)  # fmt: skip
@click.option(
    "--requests", type=click.IntRange(min=1), metavar="N",
    help="Number of requests; default: all of FILE.jsonl, or as many generated ones as take a few seconds.",
)  # fmt: skip
@click.option(
    "--device-pages", type=click.IntRange(min=1), metavar="N",
    help="Pages of the device KV pool; fewer pages make more restores.",
)  # fmt: skip
@click.option("--host-pages", type=click.IntRange(min=1), metavar="N", help="Pages of the pinned host KV pool.")
@policy_options
@rank_flags
@click.option(
    "--kv", type=click.Choice(KV_LAYOUTS), default="mha", show_default=True,
    help="What a page holds: K and V apart, both in one buffer, or 8-bit floats with scales (runner pattern); swa: "
    "every second layer has a sliding window, in a pool of its own; hybrid: full attention, windows and states.",
)  # fmt: skip
@click.option(
    "--host-layout", type=click.Choice(HOST_LAYOUTS), default="layer-first", show_default=True,
    help="What lies together in host memory.",
)  # fmt: skip
@click.option(
    "--io", type=click.Choice(IO_BACKENDS),
    help="How pages are copied: by a gather over indices, or run by run.  [default: direct on a GPU, else kernel]",
)  # fmt: skip
@click.option("--graphs", is_flag=True, help="Replay captured graphs for decode rounds (runner pattern).")
@click.option(
    "--compact-every", type=click.IntRange(min=0), default=0, metavar="N",
    help="Move pages to lower addresses every N scheduler steps; 0: never.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
    help="Of the workload, the weights and the random schedule.",
)  # fmt: skip
@click.option(
    "--serve", is_flag=False, flag_value=str(DEFAULT_PORT), metavar="[PORT]",
    help=f"Serve Prometheus metrics and a status page on 127.0.0.1 during the run and after it, until interrupted; "
    f"default port {DEFAULT_PORT}, 0 for any free one.",
)  # fmt: skip
@click.option(
    "--journal", type=click.Path(path_type=Path), metavar="DIR",
    help="Keep every record of the check runs, one folder per policy, for 'hicache-obs check'; default: "
    "HICACHE_OBS_JOURNAL.",
)  # fmt: skip
@export_options
@click.option("--json", "json_file", metavar="FILE|-", help="Write the results as JSON; - is standard output.")
def command(
    fence: str,
    device: str,
    schedule: str,
    runner: str,
    workload: Path | None,
    requests: int | None,
    device_pages: int | None,
    host_pages: int | None,
    kv: str,
    host_layout: str,
    io: str | None,
    graphs: bool,
    compact_every: int,
    seed: int,
    serve: str | None,
    journal: Path | None,
    accepted_file: Path | None,
    events: str | None,
    otlp: str | None,
    json_file: str | None,
    **policies: Any,
) -> int:
    """Run a KV-cache engine with and without fences, and show what the missing fence does.

    A small serving engine with a device and a host KV cache runs the same requests under each fence policy. Its
    streams are recorded and analysed: which restored pages raced a forward round that still wrote them, what that
    did to page contents and to tokens, and what each fence cost.

    Without fences findings are expected; exit code 1 means a finding where a fence should have prevented it.
    """
    ranks = RankFlags(**{name: policies.pop(name) for name in RankFlags.__slots__})
    port = _port(serve)
    json_path = writable_json(json_file, source=workload)
    if json_file == events == "-":
        raise ConfigError("--json -, --events -: both are written to standard output; expected a file for one of them")
    options = build_options(
        fence=fence,
        device="threads" if device == "auto" and ranks.tp * ranks.pp > 1 else device,
        schedule=schedule,
        runner=runner,
        workload=workload,
        requests=requests,
        device_pages=device_pages,
        host_pages=host_pages,
        pools={"kv": kv, "host_layout": host_layout, "io": io, "graphs": graphs, "compact_every": compact_every},
        seed=seed,
        journal=journal,
        policies=DemoPolicies(**policies),
    )
    given = click.get_current_context().get_parameter_source("schedule")
    if given is click.core.ParameterSource.COMMANDLINE and options.device != "virtual":
        raise ConfigError(f"--schedule {schedule}: is for --device virtual; on {options.device} work runs when it can")
    if ranks.tp * ranks.pp > 1:
        elsewhere = [f for f, given in (("--serve", serve), ("--events", events), ("--otlp", otlp)) if given]
        return _on_ranks(options, ranks, elsewhere, load_accepted(accepted_file), json_file, json_path)
    if ranks.off:
        raise ConfigError(f"--off {ranks.off[0]}: one rank has no peers to decide with; expected --tp 2 or more")
    from hicache_obs.exporters.findings_board import FindingsBoard
    from hicache_obs.exporters.prometheus import Metrics

    accepted, sent = load_accepted(accepted_file), otlp_options(otlp, use_environment=port is not None)
    board = FindingsBoard()
    metrics = Metrics() if port is not None or sent is not None else None
    console = Console(stderr="-" in (json_file, events))
    with contextlib.ExitStack() as stack:
        if metrics is not None and port is not None:
            server = stack.enter_context(_server(metrics, port, board, accepted))
            Console(stderr=True).print(f"metrics on {server.url}\nstatus page on {server.home}")
        made = Outputs(accepted, events=events, otlp=sent, metrics=metrics or Metrics(), use_settings=False)
        outputs = stack.enter_context(contextlib.closing(made))
        results = _run(options, metrics, board, outputs)
        from hicache_obs.cli.demo_run import outcome

        # Before the JSON is there: who waits for it may interrupt at once, and still gets the exit code of the demo.
        stop = stack.enter_context(_interruption()) if port is not None else None
        write_json({"modes": [result.as_json() for result in results]}, json_file, json_path)
        _show(console, options, results, accepted)
        if stop is not None:
            Console(stderr=True).print("serving until interrupted (Ctrl-C)")
            stop.wait()
        return int(outcome(results, accepted.covers))


def _on_ranks(
    options: DemoOptions,
    flags: RankFlags,
    elsewhere: Sequence[str],
    accepted: Accepted,
    json_file: str | None,
    json_path: Path | None,
) -> int:
    """The demo on several ranks; the exit code."""
    from hicache_obs.cli.demo_ranks import rank_options, remarks, run_ranks, tables
    from hicache_obs.findings import worst

    ranks = rank_options(flags, options, elsewhere=elsewhere)
    modes, timed = run_ranks(options, ranks), options.device != "virtual"
    write_json({"modes": [mode.as_json(ranks.grid, timed=timed) for mode in modes]}, json_file, json_path)
    console = Console(stderr=json_file == "-")
    _print(console, _title(options) + f", {ranks.grid.size} ranks")
    for table in tables(ranks.grid, modes, timed=timed):
        console.print(table)
    shown = next((mode.finding for mode in modes if mode.finding is not None), None)
    if shown is not None:
        number, defect = shown
        console.print(f"First finding of {ranks.grid.names[number]}, of {defect.count} operation pairs like it:\n")
        _print(console, explain(defect.example))
    for mode in modes:
        for line in remarks(mode):
            _print(console, line)
        for name, rank in zip(ranks.grid.names, mode.ranks, strict=True):
            for line in _remarks(rank.mode):
                _print(console, f"{name}: {line}")
    return int(worst([mode.exit_code(accepted.covers) for mode in modes]))


def _title(options: DemoOptions) -> str:
    where = options.device + (f", schedule {options.schedule}" if options.device == "virtual" else "")
    return f"{len(options.requests)} requests, {options.engine.runner}, {where}"


def _run(options: DemoOptions, metrics: Metrics | None, board: FindingsBoard, outputs: Outputs) -> list[ModeResult]:
    from hicache_obs.cli.demo_run import REFERENCE, DemoRun

    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with progress_bars(*columns) as bars:
        names = [REFERENCE, *(f"{fence}: {run}" for fence in options.fences for run in ("check", "cost"))]
        tasks = {name: bars.add_task(name, total=len(options.requests), start=False) for name in names}

        def progress(name: str, done: int, total: int) -> None:
            task = tasks[name]
            if not bars.tasks[task].started:
                bars.start_task(task)
            bars.update(task, completed=done, total=total)

        run = DemoRun(options, progress=progress, metrics=metrics, board=board, outputs=outputs)
        reference = run.reference()
        return [run.mode(fence, reference) for fence in options.fences]


def build_options(
    *,
    fence: str = "all",
    device: str = "auto",
    schedule: str = "adversarial",
    runner: str = "transformer",
    workload: Path | None = None,
    requests: int | None = None,
    device_pages: int | None = None,
    host_pages: int | None = None,
    pools: Mapping[str, Any] | None = None,
    seed: int = 0,
    journal: Path | None = None,
    policies: DemoPolicies | None = None,
) -> DemoOptions:
    """The demo that these flags ask for; ``None`` takes the runner's default. ``pools``: fields of ``EngineConfig``.

    Raises:
        ConfigError, WorkloadError: A flag, or the file it names, cannot be used.
    """
    defaults = _Defaults(runner, real=workload is not None)
    work = _workload(workload, requests, defaults, seed)
    fences = FENCES if fence == "all" else (fence,)
    if journal is None and read_text("journal")[0]:
        journal = Path(read_text("journal")[0])
    if journal is not None:
        _check_folder(journal)
    import torch

    from hicache_obs.cli.demo_run import DemoOptions
    from hicache_obs.controller.engine import EngineConfig
    from hicache_obs.streams.cuda_hold import prepare_holds

    policies = policies or DemoPolicies()
    if policies.chunk_tokens is not None and policies.chunk_tokens < defaults.page_size:
        raise ConfigError(
            f"--chunk-tokens {policies.chunk_tokens}: chunks are whole pages; expected at least {defaults.page_size}"
        )
    torch.set_num_threads(1)  # the workers of the threads device are the parallelism
    if device in ("auto", "cuda"):
        prepare_holds()  # to ask for a device starts CUDA
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "threads"
    engine = EngineConfig(
        runner=runner,
        fence=fences[0],
        device_pages=device_pages or defaults.device_pages,
        host_pages=host_pages or defaults.host_pages,
        page_size=defaults.page_size,
        layers=max(defaults.layers, HYBRID_LAYERS if (pools or {}).get("kv") == "hybrid" else 1),
        heads=defaults.heads,
        head_dim=defaults.head_dim,
        vocabulary=VOCABULARY,
        seed=seed,
        scheduler=policies.scheduler(max_running=defaults.max_running, max_extend_tokens=32 * defaults.page_size),
        write_fence=policies.write_fence,
        storage=policies.storage_config(),
        **(pools or {}),
    )
    return DemoOptions(fences, device, schedule, seed, engine, work, journal)


def _workload(path: Path | None, requests: int | None, defaults: _Defaults, seed: int) -> Sequence[Request]:
    from hicache_obs.controller.workloads import generate

    if path is not None:
        from hicache_obs.controller.workload_file import load_jsonl

        return load_jsonl(path, tokens_per_block=defaults.page_size, vocabulary=VOCABULARY, limit=requests)
    return generate(
        requests or defaults.requests,
        seed=seed,
        tokens_per_block=defaults.page_size,
        vocabulary=VOCABULARY,
        reuse=0.85,
        conversations=32,
        max_blocks=10,
        max_output=24,
    )


# -- output --------------------------------------------------------------------------------------------------


def _show(console: Console, options: DemoOptions, results: Sequence[ModeResult], accepted: Accepted) -> None:
    console.print(_title(options), highlight=False)
    table = Table()
    table.add_column("fence policy")
    for result in results:
        table.add_column(result.fence, justify="right")
    for name, values in zip(ROWS, zip(*(_column(result) for result in results), strict=True), strict=True):
        table.add_row(name, *values)
    console.print(table)
    shown = next((defect for result in results if (defect := result.first()) is not None), None)
    if shown is None:
        console.print("No findings.")
    else:
        others = sum(len(result.tally.defects) for result in results) - 1
        console.print(f"First finding, of {shown.count} operation pairs like it (other kinds: {others}):\n")
        _print(console, explain(shown.example))
        acceptance = accepted.of(shown.example)
        if acceptance is not None:
            _print(console, f"  accepted until {acceptance.expires}: {acceptance.reason}")
    for result in results:
        for line in _remarks(result):
            _print(console, line)


def _print(console: Console, text: str) -> None:
    console.print(fit(text, indent=FINDING_INDENT, to=console.file), highlight=False, markup=False, soft_wrap=True)


def _column(result: ModeResult) -> list[str]:
    """Values of ``ROWS``."""
    return [
        f"{result.rounds:,}",
        f"{result.restored_pages:,}",
        f"{result.pages_checked:,}",
        _alarm(result.verdicts(Verdict.VIOLATION)),
        f"{result.verdicts(Verdict.LATENT):,}",
        _alarm(result.corrupted_pages),
        _alarm(result.wrong_requests),
        f"{result.cost.fences:,}",
        f"{result.cost.fence_wait_ns(0.5) / 1e6:,.3f}",
        f"{result.cost.fence_wait_ns(0.99) / 1e6:,.3f}",
        f"{result.cost.avoidable_ns / 1e6:,.2f}",
        f"{result.output_tokens / result.seconds:,.0f}" if result.seconds else "-",
    ]


def _alarm(count: int) -> str:
    return f"[bold red]{count:,}[/]" if count else "0"


def _remarks(result: ModeResult) -> Iterator[str]:
    """What the table does not say, and a newcomer must know."""
    if not result.pairs_checked:
        yield (
            f"{result.fence}: nothing was checked: no restored page had been used before. "
            "Use more --requests or fewer --device-pages."
        )
    if result.lost:
        lost = f"{result.fence}: {result.lost} records were lost"
        yield f"{lost}, so verdicts may be missing; raise HICACHE_OBS_RING_SLOTS."
    if result.journal_problem:
        yield f"{result.fence}: the journal is incomplete ({result.journal_problem}); it says where."
    if result.unexplained_pages:
        pages = f"{result.unexplained_pages} corrupted pages"
        yield f"{result.fence}: {pages} have no finding: this is a bug in hicache-obs."
    if result.verdicts(Verdict.CONTRADICTION):
        yield f"{result.fence}: {result.verdicts(Verdict.CONTRADICTION)} pairs are proven ordered but measured broken."


# -- input ---------------------------------------------------------------------------------------------------


def _port(serve: str | None) -> int | None:
    if serve is None:
        return None
    if not serve.isdecimal() or int(serve) > 65535:
        raise ConfigError(f"--serve {serve}: not a port; expected 0 to 65535")
    return int(serve)


def _server(metrics: Metrics, port: int, board: FindingsBoard, accepted: Accepted) -> Server:
    from hicache_obs.exporters.endpoint import serve

    return serve(metrics, board=board, accepted=accepted, port=port)


def _check_folder(path: Path) -> None:
    """Make the journal directory, before anything runs."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--journal {path}: cannot be made ({error.strerror}); expected a writable directory"
        ) from None
    if not os.access(path, os.W_OK):
        raise ConfigError(f"--journal {path}: not writable; expected a writable directory")


@contextlib.contextmanager
def _interruption() -> Iterator[threading.Event]:
    """An event that an interrupt or a request to terminate sets, instead of ending the process."""
    stop = threading.Event()
    before = {name: signal.signal(name, lambda *_: stop.set()) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
