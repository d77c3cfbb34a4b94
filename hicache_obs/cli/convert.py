"""``hicache-obs convert``: recordings as timelines for Perfetto and Chrome, or as records for other people's tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click

from hicache_obs.cli.judge import Progress, check_copies, check_journal, journals_at, plain, progress_of
from hicache_obs.cli.layout import fit
from hicache_obs.errors import ConfigError, TraceError, naming
from hicache_obs.readers import open_trace
from hicache_obs.readers.batches import Batches, open_batches, trace_batches
from hicache_obs.readers.join import join
from hicache_obs.readers.journal_format import JournalInfo
from hicache_obs.readers.open_profile import open_profile
from hicache_obs.readers.profile import Profile
from hicache_obs.readers.profile_records import processes, profile_trace
from hicache_obs.records import ALL_LAYERS

if TYPE_CHECKING:
    from hicache_obs.exporters.timeline import Numbers, TimelineWriter
    from hicache_obs.exporters.timeline_links import Links

FORMATS: Final = ("perfetto", "chrome", "parquet", "journal", "nsys")
SUFFIXES: Final = {
    ".pftrace": "perfetto",
    ".perfetto-trace": "perfetto",
    ".json": "chrome",
    ".json.gz": "chrome",
    ".parquet": "parquet",
    ".arrows": "journal",
    ".nsys-rep": "nsys",
}
_SHOWN: Final = 5
"""Defects named in the summary; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One input, opened.

    Attributes:
        path: As it was named.
        traces: Its records; of a profile alone, made when needed.
        profile: If it is one.
        shift_ns: From the profile's clock to that of the records.
    """

    path: Path
    traces: list[Batches]
    profile: Profile | None = None
    shift_ns: int = 0


@click.command("convert")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE|DIR...")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), metavar="OUT",
    help="What to write; its suffix says as what: .pftrace, .json, .json.gz, .parquet, .arrows, .nsys-rep.",
)  # fmt: skip
@click.option(
    "--to", type=click.Choice(FORMATS), help="The format, where the suffix does not say; a folder of records."
)
@click.option(
    "--journal", type=click.Path(path_type=Path), metavar="DIR",
    help="Journal of the run that a profile is of: page sets, order and findings from it, times from the profile.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace OUT if it is there. An input is never overwritten.")
def command(files: Sequence[Path], output: Path, to: str | None, journal: Path | None, force: bool) -> int:
    """Write recordings as a timeline with fences and findings as arrows, or as plain records.

    FILE is whatever 'analyze' takes. Perfetto (.pftrace) opens in ui.perfetto.dev, Chrome's JSON (.json, .json.gz) in
    chrome://tracing too; Parquet and journals hold every record, and 'analyze' and 'check' read them back. With
    --to parquet or --to journal OUT is a folder with a file per rank. .nsys-rep is a copy of FILE.nsys-rep with the
    findings as ranges, where the installed Nsight Systems can write one.

    The exit code does not depend on what is found: 0 if OUT was written.
    """
    kind = _format(output, to)
    check_journal(files, journal)
    from hicache_obs.cli.output_file import check_output
    from hicache_obs.whole_file import written

    check_output(output, [*files, *([] if journal is None else [journal])], force=force)
    with progress_of(files[0]) as progress:
        recordings = [_open(path, journal, progress) for path in files]
        with written(output) as partial:
            if kind in ("parquet", "journal"):
                lines = _write_records(recordings, partial, kind, as_file=output.suffix in SUFFIXES)
            elif kind == "nsys":
                lines = _annotate(recordings, partial)
            else:
                lines = _write_timeline(recordings, partial, kind, progress)
    for line in lines:
        click.echo(fit(line if line.startswith(" ") else f"{output}: {line}", indent=4))
    return 0


def _format(output: Path, to: str | None) -> str:
    by_suffix = next((kind for suffix, kind in SUFFIXES.items() if output.name.endswith(suffix)), None)
    if to is None and by_suffix is None:
        known = ", ".join(SUFFIXES)
        raise ConfigError(f"-o {output}: says no format; expected a suffix of {known}, or --to")
    if to is not None and by_suffix not in (None, to):
        raise ConfigError(f"--to {to}: but the suffix of -o {output} says {by_suffix}")
    return to or by_suffix or ""


def _open(path: Path, journal: Path | None, progress: Progress) -> Recording:
    progress(f"reading {path.name}", 0, 0)
    profile = open_profile(path)
    if profile is None:
        if journal is not None:
            raise ConfigError(f"--journal {journal}: belongs to a profile, but {path} is none")
        return Recording(path, [open_batches(place, rank=rank) for place, rank in journals_at(path)])
    if journal is None:
        return Recording(path, [], profile)
    joined = [join(open_trace(place, rank=rank), profile) for place, rank in journals_at(journal)]
    shift_ns = joined[0][1].shift_ns if joined else 0
    return Recording(path, [trace_batches(trace) for trace, _ in joined], profile, shift_ns)


# -- records -------------------------------------------------------------------------------------------------


def _write_records(recordings: Sequence[Recording], output: Path, kind: str, *, as_file: bool) -> list[str]:
    """Parquet or journals: a file if ``as_file``, else a folder with one per rank."""
    traces = [batches for recording in recordings for batches in _traces(recording)]
    if not traces:
        raise TraceError(f"{recordings[0].path}: nothing was recorded")
    if as_file and len(traces) > 1:
        raise ConfigError(
            f"{recordings[0].path}: {len(traces)} traces do not fit into one file; name a folder: -o DIR --to {kind}"
        )
    infos = [batches.info or JournalInfo() for batches in traces]
    if len({info.rank for info in infos}) < len(infos):
        infos = [JournalInfo(rank=number) for number in range(len(infos))]
    if not as_file:
        output.mkdir()
    count = sum(
        _write_trace(batches, info, output, kind, as_file=as_file) for batches, info in zip(traces, infos, strict=True)
    )
    notes = dict.fromkeys(note for batches in traces for note in batches.notes)
    return [f"{_count(count, 'record')} of {_count(len(traces), 'trace')}", *_indented(notes)]


def _write_trace(batches: Batches, info: JournalInfo, output: Path, kind: str, *, as_file: bool) -> int:
    if kind == "parquet":
        from hicache_obs.readers.parquet import write_parquet

        return write_parquet(output if as_file else output / f"rank{info.rank}.parquet", batches.read(), info)
    from hicache_obs.readers.journal_writer import DEFAULT_SEGMENT_BYTES, JournalWriter

    folder = output.parent / "segments" if as_file else output
    writer = JournalWriter(
        folder,
        rank=info.rank,
        engine=info.engine,
        clock=info.clock,
        wall_ns=info.wall_ns,
        host_ns=info.host_ns,
        segment_bytes=1 << 62 if as_file else DEFAULT_SEGMENT_BYTES,
    )
    count = 0
    with closing(writer):
        for batch in batches.read():
            writer.write(batch)
            count += len(batch)
        path = writer.path
    if as_file and path is not None:
        path.rename(output)
    return count


def _traces(recording: Recording) -> Iterator[Batches]:
    """The records of an input; of a profile alone one trace per process, without page sets."""
    profile = recording.profile
    if profile is None or recording.traces:
        yield from recording.traces
        return
    nothing = dict.fromkeys(range(len(profile.ops)), ((), ALL_LAYERS))
    for process in processes(profile):
        yield trace_batches(profile_trace(profile, nothing, process=process))


# -- timelines -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Drawn:
    """What is in a timeline: counts, and what to say about it."""

    operations: int = 0
    streams: int = 0
    arrows: int = 0
    undecided: int = 0
    defects: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For the user."""
        parts = [f"{_count(self.operations, 'operation')} on {_count(self.streams, 'stream')}"]
        counts = (self.arrows, "wait"), (sum(self.defects.values()), "finding"), (self.undecided, "undecided pair")
        parts += [_count(number, noun) for number, noun in counts if number]
        shown = [f"{count:,} of {title}" for title, count in self.defects.most_common(_SHOWN)]
        return [", ".join(parts), *_indented([*shown, *dict.fromkeys(self.notes)])]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _indented(lines: Any) -> list[str]:
    return [f"  {plain(line, width=1000)}" for line in lines]


def _write_timeline(recordings: Sequence[Recording], output: Path, kind: str, progress: Progress) -> list[str]:
    from hicache_obs.exporters.profile_timeline import first_ns
    from hicache_obs.exporters.timeline import Numbers

    numbers = Numbers()
    links = [[_links(batches, numbers, progress) for batches in recording.traces] for recording in recordings]
    starts = [found.first_ns for group in links for found in group if found.first_ns is not None]
    starts += [first_ns(r.profile) + r.shift_ns for r in recordings if r.profile is not None]
    drawn = _Drawn()
    with _opened(output) as file:
        writer = _writer(file, kind, min(starts, default=0))
        rank = 0
        for recording, found in zip(recordings, links, strict=True):
            for batches, arrows in zip(recording.traces, found, strict=True):
                _draw_trace(batches, arrows, writer, numbers, rank, drawn, progress)
                rank += 1
            if recording.profile is not None:
                rank += _draw_profile(recording, writer, numbers, rank, drawn, progress)
        writer.close()
    return drawn.lines()


def _opened(output: Path) -> IO[bytes]:
    """The file, packed if its name says so; without a time stamp, so that equal input gives equal output."""
    if output.suffix != ".gz":
        return output.open("xb")
    import gzip

    return gzip.GzipFile(output, "xb", compresslevel=5, mtime=0)  # type: ignore[return-value]


def _writer(file: IO[bytes], kind: str, base_ns: int) -> Any:
    if kind == "chrome":
        from hicache_obs.exporters.chrome import ChromeWriter

        return ChromeWriter(file, base_ns)
    from hicache_obs.exporters.perfetto import PerfettoWriter

    return PerfettoWriter(file)


def _links(batches: Batches, numbers: Numbers, progress: Progress) -> Links:
    from hicache_obs.exporters.timeline_links import Links

    links, done = Links(numbers), 0
    for batch in batches.read():
        with naming(batches.source):
            links.feed(batch)
        done += len(batch)
        progress(f"judging {Path(batches.source).name}", done, 0)
    links.finish()
    return links


def _draw_trace(
    batches: Batches, links: Links, writer: TimelineWriter, numbers: Numbers, rank: int, drawn: _Drawn, tell: Progress
) -> None:
    from hicache_obs.exporters.record_timeline import RecordTimeline

    timeline, done = RecordTimeline(writer, numbers, batches.source, rank, links, batches.labels), 0
    for batch in batches.read():
        timeline.feed(batch)
        done += len(batch)
        tell(f"writing {Path(batches.source).name}", done, 0)
    timeline.finish()
    drawn.operations += timeline.operations
    drawn.streams += timeline.streams
    drawn.arrows += links.arrows
    drawn.defects.update(finding.title for finding in links.findings)
    drawn.notes += batches.notes
    if links.more:
        drawn.notes.append(f"{links.more:,} more findings are not drawn")
    if timeline.operations and not links.measured:
        drawn.notes.append(f"{batches.source}: nothing was measured; operations are marks where they were issued")


def _draw_profile(
    recording: Recording, writer: TimelineWriter, numbers: Numbers, rank: int, drawn: _Drawn, progress: Progress
) -> int:
    """Draw a profile's own rows; returns how many processes it has."""
    from hicache_obs.exporters.profile_timeline import UndecidedPair, draw_profile

    profile = recording.profile
    assert profile is not None
    pairs = [] if recording.traces else check_copies(profile, progress).undecided
    found = draw_profile(
        profile,
        writer,
        numbers,
        rank=rank,
        shift_ns=recording.shift_ns,
        undecided=[UndecidedPair(p.process, p.earlier, p.later, p.cause) for p in pairs],
        progress=lambda done, total: progress(f"writing {recording.path.name}", done, total),
    )
    if not recording.traces:  # otherwise they are those of the records
        drawn.operations += found.operations
        drawn.streams += found.streams
    drawn.arrows += found.arrows
    drawn.undecided += len(pairs)
    return len({s.process for s in profile.streams} | {t.process for t in profile.threads})


# -- Nsight Systems ------------------------------------------------------------------------------------------


def _annotate(recordings: Sequence[Recording], output: Path) -> list[str]:
    from hicache_obs.exporters.nsys_findings import annotate
    from hicache_obs.exporters.timeline import Numbers

    (recording,) = recordings if len(recordings) == 1 else (None,)
    if recording is None or recording.path.suffix != ".nsys-rep" or not recording.traces:
        raise ConfigError(
            f"-o {output.name}: is a copy of one .nsys-rep with the findings of its journal; "
            "expected FILE.nsys-rep and --journal DIR"
        )
    numbers = Numbers()
    findings = []
    for batches in recording.traces:
        findings += _links(batches, numbers, lambda stage, done, total: None).findings
    annotate(recording.path, output, findings, shift_ns=recording.shift_ns)
    return [f"{recording.path.name} with {len(findings):,} findings as ranges of the domain 'hicache findings'"]
