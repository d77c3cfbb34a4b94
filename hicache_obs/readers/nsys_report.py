"""``exported``: a ``.nsys-rep`` or ``.qdstrm`` made readable by the Nsight Systems that is installed here.

Both are private formats: only the vendor's own tools read them, and only those at least as new as the recording.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hicache_obs.errors import TraceError
from hicache_obs.readers.trace_file import size_of

REPORTS: Final = (".nsys-rep", ".qdrep")
STREAMS: Final = (".qdstrm",)
DEADLINE_S: Final = 1800
_IMPORTER: Final = "QdstrmImporter"
_IMPORTER_FOLDERS: Final = (
    "/usr/lib/nsight-systems/host-linux-x64",
    "/opt/nvidia/nsight-systems/*/host-linux-x64",
    "/usr/local/cuda*/nsight-systems*/host-linux-x64",
)


def is_report(path: Path) -> bool:
    """Whether ``path`` is named like one."""
    return path.suffix in (*REPORTS, *STREAMS)


@contextlib.contextmanager
def exported(path: Path) -> Iterator[Path]:
    """A SQLite export of the report at ``path``, in a temporary folder; the report is not touched.

    Raises:
        TraceError: The tool is not installed, or cannot read the file.
    """
    size_of(path)
    nsys = shutil.which("nsys")
    if nsys is None:
        raise TraceError(
            f"{path}: needs the nsys of Nsight Systems on PATH; or export it elsewhere: nsys export --type sqlite"
        )
    with tempfile.TemporaryDirectory(prefix="hicache-obs-") as folder:
        report = path.absolute()
        if path.suffix in STREAMS:
            report = Path(folder) / "imported.nsys-rep"
            import_report(path, report)
        out = Path(folder) / "export.sqlite"
        _run(path, [nsys, "export", "--type", "sqlite", "--output", str(out), str(report)])
        if not out.is_file():
            raise TraceError(f"{path}: nsys export wrote nothing")
        yield out


def import_report(path: Path, report: Path) -> None:
    """Write the ``.nsys-rep`` of the ``.qdstrm`` at ``path``.

    Raises:
        TraceError: The tool is not installed, or cannot read the file.
    """
    _run(path, [_importer(path), "-i", str(path.absolute()), "-o", str(report)])


def _importer(path: Path) -> str:
    found = shutil.which(_IMPORTER)
    if found is not None:
        return found
    for pattern in _IMPORTER_FOLDERS:
        for place in sorted(Path("/").glob(f"{pattern[1:]}/{_IMPORTER}"), reverse=True):
            return str(place)
    raise TraceError(f"{path}: needs {_IMPORTER} of Nsight Systems on PATH; or record with an nsys that has it")


def _run(path: Path, command: list[str]) -> None:
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=DEADLINE_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TraceError(f"{path}: {Path(command[0]).name} took longer than {DEADLINE_S} s") from None
    except OSError as error:
        raise TraceError(f"{path}: {command[0]}: {error.strerror}") from None
    if ended.returncode:
        lines = [line.strip() for line in (ended.stderr + ended.stdout).splitlines() if line.strip()]
        said = [line for line in lines if not line.startswith("[")]  # what an exception carries along
        why = said[-1][:200] if said else f"exit code {ended.returncode}"
        raise TraceError(f"{path}: {Path(command[0]).name} cannot read it: {why}")
