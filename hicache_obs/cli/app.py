"""The command group: commands load when they run, errors become one line and an exit code."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Final

import click

from hicache_obs.errors import GateTimeout, InputError, RankError
from hicache_obs.findings import ExitCode

COMMANDS: Final = {
    "demo": "Show the race, the proof and the fix on a real engine.",
    "bench-fences": "Compare barriers and fences on a workload, in virtual time.",
    "check": "Check scenario, journal and ring files for races.",
    "explore": "Run a controller for every way its host code can go.",
    "analyze": "Judge Nsight Systems and torch.profiler recordings.",
    "fleet": "Judge the journals of many ranks, and compare the ranks.",
    "report": "Write verdict, findings, timeline and costs as one HTML file.",
    "record": "Run a command under a profiler, and judge what it recorded.",
    "convert": "Write timelines for Perfetto and Chrome, Parquet, journals.",
    "replay": "Prove a finding: run its witness on the virtual device.",
    "agent": "Watch a node: read, judge and export what its ranks record.",
    "status": "Show the rings of this node and whether they are read.",
    "off": "Stop recording in running processes, without a restart.",
    "on": "Start recording again.",
    "dashboards": "Write alerts, dashboards, manifests and runbooks.",
    "audit-sglang": "Say what orders HiCache's transfers in an SGLang release.",
    "doctor": "Show settings, versions and what cannot be seen here.",
}
"""Name and one-line help; module ``hicache_obs.cli.NAME``, with ``_`` for ``-``, is imported only to run it."""


PACKAGES: Final = {
    **{name: name for name in ("jsonschema", "msgspec", "numpy", "nvtx", "perfetto", "pyarrow", "rich", "torch")},
    **dict.fromkeys(("bokeh", "jinja2"), "'hicache-obs[report]'"),
    **dict.fromkeys(("cryptography", "dask", "distributed", "fsspec"), "'hicache-obs[fleet]'"),
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
}
"""Packages that a command may find missing where little is installed, by what is imported from each."""


class _UnreadError(Exception):
    """Standard output is a pipe that nobody reads any more."""


class _LazyGroup(click.Group):
    """Lists commands without importing them, so that ``--help`` is quick and needs no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:  # click raises an error whose message is the whole help
            click.echo(self.get_help(ctx), err=True)
            ctx.exit(ExitCode.BAD_INPUT)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise click.UsageError(f"No such command {name!r}; {meant}'hicache-obs --help' lists them")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"hicache_obs.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _UnreadError from None  # click would make it exit code 1, which means findings
        except SystemExit as error:
            if error.code == 1:  # rich's way out of the same
                raise _UnreadError from None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 clean or as expected, 1 findings, 2 bad input, 3 nothing checked or not decidable, "
    "70 a mistake of ours, 130 interrupted, 141 nobody reads the output.",
)
@click.version_option(package_name="hicache-obs")
def group() -> None:
    """Makes GPU-stream ordering in LLM KV caches visible and provable."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: ``sys.argv``); returns the exit code. Never raises for a caller's mistake."""
    try:
        code = group.main(args=arguments, standalone_mode=False, prog_name="hicache-obs")
        return int(code or ExitCode.CLEAN)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _fail("interrupted", ExitCode.INTERRUPTED)
    except _UnreadError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be flushed would be a traceback at the end
        return ExitCode.UNREAD
    except (click.MissingParameter, click.BadOptionUsage, click.NoSuchOption) as error:
        command = error.ctx.command_path if error.ctx is not None else "hicache-obs"
        text = error.format_message().rstrip(".")
        return _fail(f"{text}{'' if text.endswith('?') else ';'} see '{command} --help'", ExitCode.BAD_INPUT)
    except click.ClickException as error:
        return _fail(error.format_message().replace("\n", " "), ExitCode.BAD_INPUT)
    except InputError as error:
        return _fail(str(error), ExitCode.BAD_INPUT)
    except (GateTimeout, RankError) as error:
        return _fail(str(error), ExitCode.NOTHING_CHECKED)
    except ModuleNotFoundError as error:
        package = PACKAGES.get((error.name or "").partition(".")[0])
        if package is None:
            return _bug()
        return _fail(
            f"this needs the package {package}, which is not installed: pip install {package}", ExitCode.BAD_INPUT
        )
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and error.filename is None:
            return _fail(f"the output cannot be written: {error.strerror}", ExitCode.BAD_INPUT)
        return _bug()
    except Exception:  # noqa: BLE001 the last resort turns any bug into exit code 70
        return _bug()


def _bug() -> int:
    """The exception being handled is a mistake of ours."""
    traceback.print_exc()
    return _fail("internal error, please report it with the text above", ExitCode.INTERNAL)


def _fail(message: str, code: ExitCode) -> int:
    print(f"hicache-obs: {message}", file=sys.stderr)
    return int(code)
