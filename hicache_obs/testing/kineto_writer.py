"""torch.profiler traces made of known histories, as its versions would write them. See ``profiled``."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hicache_obs.records import Direction
from hicache_obs.testing.profiled import Seen, SeenRecord, SeenSync

_COPY_NAMES: Final = {
    Direction.HOST_TO_DEVICE: "Memcpy HtoD (Pinned -> Device)",
    Direction.DEVICE_TO_HOST: "Memcpy DtoH (Device -> Pinned)",
    Direction.DEVICE_TO_DEVICE: "Memcpy DtoD (Device -> Device)",
}
_SYNC_KINDS: Final = {
    "cudaStreamWaitEvent": "Stream Wait Event",
    "cudaEventSynchronize": "Event Sync",
    "cudaEventQuery": "Event Sync",
    "cudaStreamSynchronize": "Stream Sync",
    "cudaDeviceSynchronize": "Context Sync",
}


@dataclass(frozen=True)
class KinetoFormat:
    """What one version writes.

    Attributes:
        times: ``int``: whole microseconds. ``decimal``: 16 digits and a fraction. ``base``: relative to
            ``baseTimeNanoseconds``.
        sync: There are ``cuda_sync`` rows.
        pairs: They name the record call. ``latest``: only the last record of each event is known, so a wait may name
            a later one. ``none``: older than that. ``unresolved``: CUDA 12.9 and newer.
        hip: AMD's names, and no ``cuda_sync`` rows.
    """

    times: str = "base"
    sync: bool = True
    pairs: str = "all"
    hip: bool = False


FORMATS: Final = {
    "2022": KinetoFormat(times="int", pairs="none"),
    "2023": KinetoFormat(times="int", pairs="latest"),
    "2024": KinetoFormat(times="decimal", pairs="latest"),
    "2025": KinetoFormat(),
    "2025 without cuda_sync": KinetoFormat(sync=False),
    "2026, CUDA 13": KinetoFormat(pairs="unresolved"),
    "2026, AMD": KinetoFormat(sync=False, hip=True),
}


def write_kineto(path: Path, seen: Seen, style: KinetoFormat) -> Path:
    """The trace of one process as JSON, gzipped if ``path`` says so."""
    text = _Trace(seen, style).text()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), 1))
    else:
        path.write_text(text)
    return path


class _Trace:
    """Builds one trace."""

    def __init__(self, seen: Seen, style: KinetoFormat) -> None:
        self._seen = seen
        self._style = style
        self._base = 1_699_999_999_000_000_000 if style.times == "base" else 0
        self._working = {op.stream for op in seen.ops}
        self._numbers: list[str] = []

    def text(self) -> str:
        """The whole file."""
        seen, style = self._seen, self._style
        head: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": []}
        if style.times == "base":
            head["baseTimeNanoseconds"] = self._base
        events = [self._call(call) for call in seen.calls]
        events += [self._op(op) for op in seen.ops]
        if style.sync and not style.hip:
            kept = [s for s in seen.syncs if s.name != "cudaStreamWaitEvent" or s.stream in self._working]
            events += [self._sync(sync) for sync in kept]
        text = json.dumps({**head, "traceEvents": events})
        for number, written in enumerate(self._numbers):
            text = text.replace(f'"@{number}@"', written, 1)
        return text

    def _us(self, ns: int) -> Any:
        """Microseconds; digits that a float would lose are put in at the end."""
        ns -= self._base
        if self._style.times == "int":
            return ns // 1000
        if self._style.times == "base":
            return ns / 1000
        self._numbers.append(f"{ns // 1000}.{ns % 1000:03d}")
        return f"@{len(self._numbers) - 1}@"

    def _event(self, cat: str, name: str, start: int, end: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        where = {"pid": self._seen.process if cat == "cuda_runtime" else 0, "tid": tid}
        span = {"ts": self._us(start), "dur": self._us(end - start + self._base)}
        return {"ph": "X", "cat": cat, "name": name, **where, **span, "args": args}

    def _call(self, call: Any) -> dict[str, Any]:
        name = call.name.replace("cuda", "hip", 1) if self._style.hip else call.name
        args = {"cbid": 1, "correlation": call.correlation}
        return self._event("cuda_runtime", name, call.start_ns, call.end_ns, call.thread, args)

    def _op(self, op: Any) -> dict[str, Any]:
        args = {"device": 0, "context": 1, "stream": op.stream, "correlation": op.correlation}
        if op.direction is None:
            return self._event("kernel", "forward", op.start_ns, op.end_ns, op.stream, args)
        args["bytes"] = 4096
        return self._event("gpu_memcpy", _COPY_NAMES[op.direction], op.start_ns, op.end_ns, op.stream, args)

    def _sync(self, sync: SeenSync) -> dict[str, Any]:
        window = {call.correlation: call for call in self._seen.calls}.get(sync.correlation)
        start, end = (window.start_ns, window.end_ns) if window else (self._base + 1000, self._base + 2000)
        stream = -1 if sync.stream is None else sync.stream
        args: dict[str, Any] = {
            "cuda_sync_kind": _SYNC_KINDS[sync.name],
            "stream": stream,
            "correlation": sync.correlation,
            "device": 0,
            "context": 1,
        }
        if sync.event is not None:
            args |= self._names(sync)
        return self._event("cuda_sync", _SYNC_KINDS[sync.name], start, end, stream, args)

    def _names(self, sync: SeenSync) -> dict[str, int]:
        """What a wait's row says of its record."""
        pairs = self._style.pairs
        of: SeenRecord | None = sync.of if sync.of in self._seen.records else None
        if pairs == "latest":
            of = next((r for r in reversed(self._seen.records) if r.event == sync.event), None)
        if pairs == "unresolved" or of is None:
            return {"wait_on_stream": -1, "wait_on_cuda_event_record_corr_id": -1, "wait_on_cuda_event_id": 1}
        named = {"wait_on_stream": of.stream, "wait_on_cuda_event_id": of.event}
        return named if pairs == "none" else {**named, "wait_on_cuda_event_record_corr_id": of.correlation}
