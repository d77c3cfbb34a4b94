"""Path by path through an SGLang release: the edge that orders each transfer, where it is, or which one is missing.

Read from the release's source, without importing it. A verdict says how it is known: some paths are also driven for
real by this project's tests (``make test-sglang``), the others are read only.
"""

from __future__ import annotations

import ast
import enum
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final


class Verdict(enum.Enum):
    """What is known about a path."""

    ORDERED = "ordered"
    RACE = "race"
    """Nothing orders it once the scheduler's barrier is the read-done event."""
    UNDECIDED = "not decidable here"
    ABSENT = "not in this release"


@dataclass(frozen=True, slots=True)
class Probe:
    """A place in the source that carries an edge.

    Attributes:
        files: Candidates below ``sglang/srt``, newest layout first.
        name: Function or method, ``Class.method``; empty for the whole file.
        pattern: Regular expression that must be found in it.
    """

    files: tuple[str, ...]
    name: str
    pattern: str


@dataclass(frozen=True, slots=True)
class Way:
    """One way KV pages are transferred.

    Attributes:
        path: Its name.
        place: Where it is; a release without it does not have the path.
        edge: What orders it, in words.
        proof: Probes that must all be found for that edge to exist; none: it cannot be read from the source.
        how: How the verdict was checked.
        without: What may happen without the edge.
        patch: The one line that adds it.
        coarse: What orders it without that edge where the schedule stream waits for whole rounds and for nothing less.
        needs: What a release must have for that line to be one: the stream it names, handed to where it stands. In a
            release without it the patch is ``COARSE``.
        sure: Whether a missing probe proves that there is no edge; where nothing was run it does not.
    """

    path: str
    place: Probe
    edge: str
    proof: tuple[Probe, ...]
    how: str
    without: str = ""
    patch: str = ""
    needs: Probe | None = None
    coarse: str = ""
    sure: bool = True


@dataclass(frozen=True, slots=True)
class Audited:
    """The verdict on one path.

    Attributes:
        where: ``file:line`` of the path and of every part of its edge.
        patch: The line that adds the edge in this release; empty unless it is a race.
    """

    path: Way
    verdict: Verdict
    where: tuple[str, ...]
    patch: str = ""


_CONTROLLER: Final = ("managers/cache_controller.py",)
_SCHEDULER: Final = ("managers/scheduler.py",)
_HYBRID: Final = ("mem_cache/hybrid_cache/hybrid_cache_controller.py",)
_TREE: Final = ("mem_cache/unified_radix_cache.py",)
_DECODE: Final = ("disaggregation/decode.py",)
_OFFLOAD: Final = ("disaggregation/decode_kvcache_offload_manager.py",)
_LINKER: Final = ("mem_cache/unified_cache/unified_cache_linker.py",)
_MOONCAKE: Final = ("mem_cache/storage/mooncake_store/mooncake_direct_linker.py",)
_UMBP: Final = ("mem_cache/storage/umbp/umbp_direct_linker.py",)
_LMCACHE: Final = (
    "mem_cache/storage/lmcache/lmcache_unified_radix_cache.py",
    "mem_cache/storage/lmcache/lmc_radix_cache.py",
)
_FLEXKV: Final = ("mem_cache/storage/flexkv/flexkv_radix_cache.py",)
_HISPARSE: Final = ("managers/hisparse_coordinator.py",)
_DEDUP: Final = ("mem_cache/mla_host_dedup.py",)
_RESULTS: Final = (
    "managers/scheduler_components/batch_result_processor.py",
    "managers/scheduler_output_processor_mixin.py",
    "managers/scheduler.py",
)

_RUN: Final = "run: make test-sglang"
_READ: Final = "read in the source, not run"
_DRAIN: Final = r"schedule_stream\.wait_stream\(\s*self\.(scheduler\.)?forward_stream"
_LOAD: Final = "self.l2_transfer_engine.host_to_device_stream.wait_stream(self.load_fence_stream)"
_WRITE: Final = "self.l2_transfer_engine.device_to_host_stream.wait_stream(self.write_fence_stream)"


_LOAD_HANDED: Final = Probe(_SCHEDULER, "", r"load_fence_stream = ")
_WRITE_HANDED: Final = Probe(_SCHEDULER, "", r"write_fence_stream = ")
_LINKER_HANDED: Final = Probe(_LINKER, "UnifiedCacheLinker", r"self\.forward_stream")
_BEHIND_ROUND: Final = "the start event, on the schedule stream, which has waited for the whole round in flight"
COARSE: Final = (
    "self.schedule_stream.wait_stream(self.forward_stream)"
    "  # in Scheduler.event_loop_overlap, right behind self.run_batch(batch)"
)
"""Where nobody but the scheduler has the forward stream. Each transfer waits for an event of the schedule stream that
is recorded later; the next round's preparation on that stream waits too, which costs overlap."""


def _linker_ways(name: str, owner: str, files: tuple[str, ...]) -> tuple[Way, Way]:
    """Both ways of one linker, the class ``owner`` in ``files``."""
    how = f"run: make test-sglang, {name}'s linker over a stand-in of its store"
    return (
        Way(
            f"{name}'s linker, offload",
            Probe(files, f"{owner}.offload", r"def offload"),
            "the offload thread waits for events of the current and of the forward stream",
            (
                Probe(_LINKER, "UnifiedCacheLinker.record_offload_ready", r"record\(self\.forward_stream\)"),
                Probe(files, f"{owner}.offload", r"self\.record_offload_ready\(\)"),
            ),
            how,
            "the linker reads pages that a round in flight still writes",
            "kv_written.record(self.forward_stream)",
            _LINKER_HANDED,
        ),
        Way(
            f"{name}'s linker, load",
            Probe(files, f"{owner}.start_layer_wise_loading", r"def start_layer_wise_loading"),
            "the load thread waits for an event of the schedule stream, which has waited for the forward stream",
            (Probe(files, f"{owner}.start_layer_wise_loading", r"self\.forward_stream"),),
            how,
            "a round in flight overwrites what is loaded into pages that were freed under it",
            "device_module.current_stream().wait_stream(self.forward_stream)",
            _LINKER_HANDED,
        ),
    )


PATHS: Final = (
    Way(
        "load-back",
        Probe(_CONTROLLER, "HiCacheController.start_loading", r"def start_loading"),
        "the load stream waits for the forward stream, which Scheduler.__init__ hands to the controller",
        (
            Probe(_CONTROLLER, "HiCacheController.start_loading", r"wait_stream\(\s*self\.load_fence_stream"),
            _LOAD_HANDED,
        ),
        _RUN,
        "a decode round that still writes pages freed under it overwrites the prefix loaded into them",
        _LOAD,
        _LOAD_HANDED,
        _BEHIND_ROUND,
    ),
    Way(
        "load-back, hybrid controller",
        Probe(_HYBRID, "HybridCacheController.start_loading", r"def start_loading"),
        "as load-back; from 0.5.18 on it is the same function",
        (Probe(_HYBRID, "HybridCacheController.start_loading", r"wait_stream\(\s*self\.load_fence_stream"),),
        "read; the same scenario on the base controller of these releases is run",
        "as load-back",
        _LOAD,
        _LOAD_HANDED,
        _BEHIND_ROUND,
    ),
    Way(
        "write-back",
        Probe(_CONTROLLER, "HiCacheController.start_writing", r"def start_writing"),
        "the write stream waits for the forward stream, which Scheduler.__init__ hands to the controller",
        (
            Probe(_CONTROLLER, "HiCacheController.start_writing", r"wait_stream\(\s*self\.write_fence_stream"),
            _WRITE_HANDED,
        ),
        _RUN,
        "the host copy of a finished request lacks its last token's KV, which the round in flight writes",
        _WRITE,
        _WRITE_HANDED,
    ),
    Way(
        "retraction, backup",
        Probe(_TREE, "UnifiedRadixCache.backup_kv_cache", r"submit_device_to_host"),
        "the host: the copied slots were written by rounds whose results are processed (copy_done is synchronized); "
        "the slot of the round in flight is not copied, or lies in the padding of the last page and is computed again",
        (Probe(_TREE, "UnifiedRadixCache._retraction_device_transfers", r"seqlen - 1"),),
        _RUN,
    ),
    Way(
        "retraction, restore",
        Probe(_TREE, "UnifiedRadixCache.restore_kv_cache", r"submit_host_to_device"),
        "both callers make the schedule stream wait for the forward stream first; the start event carries it on",
        (Probe(_DECODE, "", _DRAIN),),
        _RUN,
        "the restored request's new slots are overwritten by the round in flight",
        "self.schedule_stream.wait_stream(self.forward_stream)",
    ),
    Way(
        "decode offload manager",
        Probe(_OFFLOAD, "DecodeKVCacheOffloadManager.offload_kv_cache", r"cache_controller\.write"),
        "the host: only whole pages of tokens whose results are processed are copied, and they are freed only after "
        "their ack is synchronized; its own controller has no write fence and needs none for this",
        (
            Probe(_OFFLOAD, "DecodeKVCacheOffloadManager.offload_kv_cache", r"output_ids\[:-1\]"),
            Probe(_OFFLOAD, "", r"finish_event\.synchronize\(\)"),
        ),
        _RUN,
    ),
    Way(
        "storage prefetch and backup",
        Probe(_CONTROLLER, "HiCacheController._page_transfer", r"def _page_transfer"),
        "queues between scheduler and storage threads; host pages are allocated and freed by the scheduler only",
        (Probe(_CONTROLLER, "", r"prefetch_buffer"), Probe(_CONTROLLER, "", r"backup_queue")),
        _RUN,
    ),
    *_linker_ways("Mooncake", "MooncakeDirectLinker", _MOONCAKE),
    *_linker_ways("UMBP", "UMBPDirectLinker", _UMBP),
    Way(
        "LMCache",
        Probe(_LMCACHE, "", r"class LMC(ache)?\w*RadixCache"),
        "whatever the library does on the streams and in the process it moves pages with",
        (),
        "LMCache's own code, which is not part of SGLang",
    ),
    Way(
        "FlexKV",
        Probe(_FLEXKV, "", r"class FlexKVRadixCache"),
        "stores are handed to another process, whose copies the host waits for before it evicts",
        (),
        "FlexKV's own code, which is not part of SGLang",
    ),
    Way(
        "MLA host deduplication",
        Probe(_DEDUP, "MLAHostDedupBroadcaster", r"class MLAHostDedupBroadcaster"),
        "NCCL's own stream order: the broadcast writes device pages of the other ranks",
        (),
        "needs NCCL, whose order is not visible to Python",
    ),
    Way(
        "HiSparse, decode backup",
        Probe(_HISPARSE, "HiSparseCoordinator", r"class HiSparseCoordinator"),
        "the backup stream waits for the schedule stream and for the forward stream",
        (
            Probe(_HISPARSE, "", r"decode_backup_stream\.wait_stream\("),
            Probe(_HISPARSE, "", r"decode_producer_stream"),
        ),
        _READ,
        "pages are backed up while the round in flight writes them",
        "self.decode_backup_stream.wait_stream(self.decode_producer_stream)",
        sure=False,
    ),
)


_FINE_BARRIER: Final = Probe(_SCHEDULER, "Scheduler._apply_war_barrier", r"wait_event\(")
_COARSE_BARRIER: Final = Probe(_SCHEDULER, "", r"schedule_stream\.wait_stream\(\s*self\.forward_stream")


def audit(source: Path) -> list[Audited]:
    """Judge every path of the release whose package folder (``.../sglang``) is ``source``."""
    return [_judge(source / "srt", path) for path in PATHS]


def barrier(source: Path) -> str:
    """What makes the schedule stream wait for a forward round in this release, in words."""
    srt = source / "srt"
    fine = _find(srt, _FINE_BARRIER)
    if fine is not None:
        return f"the read-done event where a round publishes one, else the whole round ({fine})"
    coarse = _find(srt, _COARSE_BARRIER)
    return "nothing" if coarse is None else f"the whole round ({coarse})"


def release_of(source: Path) -> str:
    """The release a package folder is of: from its metadata folder beside it, else from ``version.py``."""
    for folder in sorted(source.parent.glob("sglang-*.dist-info")):
        return folder.name.removeprefix("sglang-").removesuffix(".dist-info")
    text = (source / "version.py").read_text() if (source / "version.py").is_file() else ""
    match = re.search(r"\d+\.\d+\.\d+", text)
    return match[0] if match else "unknown"


def _judge(srt: Path, path: Way) -> Audited:
    place = _find(srt, path.place)
    if place is None:
        return Audited(path, Verdict.ABSENT, ())
    found = [_find(srt, probe) for probe in path.proof]
    where = (place, *(line for line in found if line is not None))
    if not path.proof:
        return Audited(path, Verdict.UNDECIDED, where)
    if None not in found:
        return Audited(path, Verdict.ORDERED, where)
    if not path.sure:
        return Audited(path, Verdict.UNDECIDED, where)
    behind = _find(srt, _COARSE_BARRIER) if path.coarse and _find(srt, _FINE_BARRIER) is None else None
    if behind is not None:
        return Audited(replace(path, edge=path.coarse), Verdict.ORDERED, (place, behind))
    handed = path.needs is None or _find(srt, path.needs) is not None
    return Audited(path, Verdict.RACE, where, path.patch if handed else COARSE)


def _find(srt: Path, probe: Probe) -> str | None:
    """``file:line`` of the first match, ``None`` if there is none."""
    for name in probe.files:
        file = srt / name
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        span = _span(text, probe.name) if probe.name else (0, len(text))
        match = re.compile(probe.pattern).search(text, *span) if span is not None else None
        if match is not None:
            return f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
    return None


def _span(text: str, name: str) -> tuple[int, int] | None:
    """Where a class, function or method is in ``text``."""
    body: list[ast.stmt] = ast.parse(text).body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next(
            (item for item in body if isinstance(item, ast.ClassDef | ast.FunctionDef) and item.name == part), None
        )
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            return None
        body = node.body
    assert node is not None
    lines = text.splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1]))
    return start, start + sum(map(len, lines[node.lineno - 1 : node.end_lineno]))
