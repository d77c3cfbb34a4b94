"""``annotate``: findings as ranges in a copy of a ``.nsys-rep``, to be seen in the Nsight Systems window.

Only the vendor writes this format: its package ``nsys_writer``, which comes with newer versions of Nsight Systems, on
top of ``nvtx.writer`` of nvtx 0.2.16 and newer (Nsight Systems Analysis Guide, "Writing Post-Collection Events").
"""

from __future__ import annotations

import glob
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from hicache_obs.errors import ConfigError
from hicache_obs.exporters.timeline import plain_text
from hicache_obs.exporters.timeline_links import DrawnFinding

DOMAIN: Final = "hicache findings"
BACKEND: Final = "NSYS_WRITER_BACKEND"
"""Environment variable that tells ``nsys_writer`` where its library is."""
_INSTALLS: Final = (
    "/opt/nvidia/nsight-systems*/*",
    "/opt/nvidia/nsight-systems*",
    "/usr/local/cuda*/nsight-systems*",
    "/usr/lib/nsight-systems",
)
_PACKAGE: Final = "target-linux-*/python/packages/nsys_writer"
_LIBRARY: Final = "host-linux-*/libNvtxwBackend.so"


def annotate(report: Path, output: Path, findings: Sequence[DrawnFinding], *, shift_ns: int) -> None:
    """Write a copy of ``report`` at ``output`` with a range, or a mark, for each finding; a row per defect.

    Args:
        report: A ``.nsys-rep``; not touched.
        output: Must end in ``.nsys-rep``, too.
        findings: What to add.
        shift_ns: What was added to the report's times, which are relative to its beginning, to get those of
            ``findings``.

    Raises:
        ConfigError: The installed Nsight Systems has no ``nsys_writer``, or it failed.
    """
    writer = _writer(output)
    rows: dict[str, list[DrawnFinding]] = {}
    for finding in findings:
        rows.setdefault(finding.title, []).append(finding)
    name = str(output.with_suffix(""))  # which adds the suffix itself
    try:
        with writer.Session(name=name, report_merge=str(report), time_base=writer.TimeBase.RELATIVE) as session:
            domain = session.get_domain(DOMAIN)
            for title, row in rows.items():
                with session.create_stream(plain_text(title), domain=domain) as stream:
                    _write(stream, sorted(row, key=lambda finding: finding.start_ns), shift_ns)
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"-o {output.name}: nsys_writer of Nsight Systems failed: {error}") from None
    if not output.is_file():
        raise ConfigError(f"-o {output.name}: nsys_writer of Nsight Systems wrote nothing")


def _write(stream: Any, findings: Iterable[DrawnFinding], shift_ns: int) -> None:
    for finding in findings:
        text = plain_text(f"{finding.name}: {finding.args['missing_edge']}")
        start, end = (max(0, at - shift_ns) for at in (finding.start_ns, finding.end_ns))
        if end > start:
            stream.write_startend(start=start, end=end, message=text, color="red")
        else:
            stream.write_mark(start, message=text, color="red")


def _writer(output: Path) -> Any:
    """The module ``nsys_writer``: as installed, or from the folder of the installed Nsight Systems."""
    try:
        return import_module("nsys_writer")
    except ModuleNotFoundError as error:
        if error.name != "nsys_writer":
            raise
    for root in _roots():
        packages, libraries = glob.glob(f"{root}/{_PACKAGE}"), glob.glob(f"{root}/{_LIBRARY}")
        if packages and libraries:
            os.environ.setdefault(BACKEND, libraries[0])
            # The folder is a project to install; the package is in it, or in its src.
            sys.path += [packages[0], f"{packages[0]}/src"]
            try:
                return import_module("nsys_writer")
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"-o {output.name}: {packages[0]} cannot be used ({error}): pip install it, and nvtx>=0.2.16"
                ) from None
    raise ConfigError(
        f"-o {output.name}: the installed Nsight Systems has no nsys_writer, which alone can write a .nsys-rep; "
        f"write the findings for Perfetto instead: -o {output.with_suffix('.pftrace').name}"
    )


def _roots() -> list[str]:
    """Folders of Nsight Systems: that of the program on PATH, then the usual ones, newest first."""
    found = []
    program = shutil.which("nsys")
    if program is not None:
        found.append(str(Path(program).resolve().parent.parent))
    for pattern in _INSTALLS:
        found += sorted(glob.glob(pattern), reverse=True)
    return found
