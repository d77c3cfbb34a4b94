"""``decode``: what is of interest of a torch.profiler trace, as it is written; and single values of it."""

from __future__ import annotations

import zlib
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
from msgspec import Struct, field

from hicache_obs.errors import TraceError
from hicache_obs.readers.profile import NO_ID, UNKNOWN
from hicache_obs.readers.trace_file import size_of

_CHUNK: Final = 1 << 20
_GZIP_FORMAT: Final = 31
"""``wbits`` of zlib."""
_GZIP: Final = b"\x1f\x8b"


class Args(Struct, gc=False):
    """Of any type: events of no interest here may use the same names for something else."""

    stream: Any = None
    device: Any = None
    context: Any = None
    correlation: Any = None
    bytes: Any = None
    cuda_sync_kind: Any = None
    wait_on_stream: Any = None
    record: Any = field(default=None, name="wait_on_cuda_event_record_corr_id")
    event: Any = field(default=None, name="wait_on_cuda_event_id")
    event_id: Any = None
    in_device: Any = field(default=None, name="inDevice")
    in_context: Any = field(default=None, name="inContext")
    hsa_queue: Any = None


class Event(Struct, gc=False):
    """One event; most are decoded and then passed over. A time of -1 us stands for none."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: int | float = -1
    dur: int | float = -1
    args: Args | None = None


class File(Struct, gc=False):
    """The whole trace."""

    events: list[Event] = field(name="traceEvents")
    base_ns: int = field(default=0, name="baseTimeNanoseconds")
    schema: Any = field(default=None, name="schemaVersion")
    cuda: Any = field(default=None, name="cuda_runtime_version")
    hip: Any = field(default=None, name="hip_runtime_version")


class TimedEvent(Event, gc=False):
    """The same with times as text."""

    ts: msgspec.Raw = msgspec.Raw(b"-1")  # type: ignore[assignment]
    dur: msgspec.Raw = msgspec.Raw(b"-1")  # type: ignore[assignment]


class TimedFile(File, gc=False):
    """The same with times as text."""

    events: list[TimedEvent] = field(name="traceEvents")  # type: ignore[assignment]


NO_ARGS: Final = Args()


def place_of(row: Args) -> tuple[int, int]:
    """Device and context of a row, ``UNKNOWN`` where it does not say."""
    device, context = row.device, row.context
    if type(device) is not int or type(context) is not int:  # few
        device, context = whole(device), whole(context)
        device = whole(row.in_device) if device == UNKNOWN else device
        context = whole(row.in_context) if context == UNKNOWN else context
    return device if 0 <= device < NO_ID else UNKNOWN, context if 0 <= context < NO_ID else UNKNOWN


def whole(value: Any) -> int:
    """A number from a row, ``UNKNOWN`` if there is none."""
    if type(value) is int:
        return value
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else UNKNOWN


def id_of(value: Any) -> int:
    """A correlation id: they count from 1, and 0 stands for none."""
    found = value if type(value) is int else whole(value)  # nearly all are as they should be
    return found if found > 0 else UNKNOWN


def unpack(source: Path, limit: int) -> bytes | bytearray:
    """The bytes of a trace, gzipped or not.

    Raises:
        TraceError: It cannot be read, is damaged, or holds more than ``limit`` bytes.
    """
    try:
        size = size_of(source)
        with source.open("rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            if packed:
                return _gunzip(source, file, limit)
            if size > limit:
                raise TraceError(f"{source}: {size} bytes; at most {limit} are read")
            return file.read(limit)
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{source}: damaged gzip file ({error})") from None
    except OSError as error:
        raise TraceError(f"{source}: {error.strerror or error}") from None


def _gunzip(source: Path, file: BinaryIO, limit: int) -> bytearray:
    """All members of a gzip file; no more than ``limit`` bytes are ever unpacked."""
    data = bytearray()
    member = zlib.decompressobj(_GZIP_FORMAT)
    while chunk := file.read(_CHUNK):
        while chunk:
            data += member.decompress(chunk, limit + 1 - len(data))
            if len(data) > limit:
                raise TraceError(f"{source}: unpacks to more than {limit} bytes, which are the most that are read")
            chunk = member.unused_data.lstrip(b"\0") if member.eof else member.unconsumed_tail
            if member.eof and chunk:
                member = zlib.decompressobj(_GZIP_FORMAT)
    if not member.eof:
        raise EOFError("it ends early")
    return data


def decode(source: Path, data: bytes | bytearray, kind: type[Any]) -> Any:
    """The trace in ``data`` as a ``File`` or ``TimedFile``.

    Raises:
        TraceError: It is no trace.
    """
    try:
        if data.startswith(BOM_UTF8):
            data = data[len(BOM_UTF8) :]
        if data[:64].lstrip()[:1] == b"[":  # the bare list of the same format
            return kind(msgspec.json.decode(data, type=list[Event] if kind is File else list[TimedEvent]))
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise TraceError(f"{source}: not a torch.profiler trace: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceError(f"{source}: not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{source}: not UTF-8 at byte {error.start}") from None
