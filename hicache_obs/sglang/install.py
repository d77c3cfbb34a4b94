"""Puts an adapter table to work: which rows apply here, which names exist, what cannot be observed without the rest."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any, Final, TypeAlias, cast

from hicache_obs.config import read_setting, read_text
from hicache_obs.findings import Hazard
from hicache_obs.recorder.ring_directory import open_ring_directory
from hicache_obs.records import CaptureMode, Ranks
from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.gpu_trace import start_gpu_trace
from hicache_obs.sglang.guard import Around, around
from hicache_obs.sglang.launch import start_agent
from hicache_obs.sglang.page_ids import PageReader
from hicache_obs.sglang.resolve import Found, resolve
from hicache_obs.sglang.session import Session
from hicache_obs.sglang.shorten import shorten
from hicache_obs.sglang.table import CPU_ADAPTERS, CUDA_ADAPTERS, SGLANG_ADAPTERS, TENSOR_ADAPTERS
from hicache_obs.sglang.versions import Version, parse_version
from hicache_obs.streams.cuda_poller import become_poller
from hicache_obs.streams.protocol import Device

SCHEDULER_ENTRY: Final = "run_scheduler_process"
"""SGLang's function that a scheduler process runs; it loads the plugins, so it is on the stack then."""
_CONTROLLER: Final = "sglang.srt.managers.cache_controller"
_LOG: Final = logging.getLogger("hicache_obs.sglang")

Register: TypeAlias = Callable[[str, Around], None]
"""``register(target, hook)`` makes the engine call ``hook(original, *args, **kwargs)`` instead of the target."""

EXTRA_ADAPTERS: Final[list[Adapter]] = []
"""Rows added by whoever runs an engine on a device module of their own, before plugins are loaded."""


@dataclass(frozen=True, slots=True)
class Installed:
    """What became of a table.

    Attributes:
        session: Of this process.
        hooked: Targets that were registered.
        hooks: The rows of these, each with its hook.
        missing: Targets of this release that are not there, with what they are instead.
    """

    session: Session
    hooked: tuple[str, ...]
    missing: dict[str, Found]
    hooks: tuple[tuple[Adapter, Around], ...] = ()


def install(session: Session, adapters: Iterable[Adapter], engine_version: Version, register: Register) -> Installed:
    """Register a hook for every row that applies; a name that does not exist makes its hazards unobservable.

    Names are looked up in source files: nothing is imported.
    """
    hooked: list[tuple[Adapter, Around]] = []
    missing: dict[str, Found] = {}
    for adapter in adapters:
        if engine_version not in adapter.versions:
            continue
        found = resolve(adapter.target)
        if found is Found.FUNCTION and adapter.on_objects:
            continue
        if found is Found.FUNCTION:
            hook = around(session, adapter)
            register(adapter.target, hook)
            hooked.append((adapter, hook))
        elif not adapter.optional:
            missing[adapter.target] = found
            if not adapter.on_objects:
                session.unobservable(adapter.hazards, f"{adapter.target} is {found.value}")
    return Installed(session, tuple([row.target for row, _ in hooked]), missing, tuple(hooked))


UNSEEN: Final = {
    Hazard.RELOCATION: "page moves are not recorded",
    Hazard.METADATA_WAR: "index buffers are not recorded",
    Hazard.RDMA: "of remote transfers only a linker's are recorded, not those between servers",
    Hazard.TP_DIVERGENCE: "collectives are not recorded",
}
"""What no row records, or not all of it."""
_NUMBERS: Final = ("ring_slots", "arena_ids", "read_ids", "link_gb_s")
INSTALLED: Final[list[Installed]] = []
"""What ``install_sglang`` did in this process; empty, or one entry."""


def install_sglang() -> Installed | None:
    """Hook SGLang through its own registry, if this process is to be observed.

    Raises:
        ConfigError: A setting has a value that is not allowed, or rings cannot be written where they are to be.
    """
    mode = read_text("mode")[0]
    frame = _scheduler_frame()
    if mode == "off" or INSTALLED or (frame is None and read_text("processes")[0] == "scheduler"):
        return None
    for name in _NUMBERS:  # now, and not when the first of them is needed: by then nobody looks at the log
        read_setting(name)
    read_text("agent")
    open_ring_directory()
    text = sglang_version()
    session = Session(
        f"SGLang {text}",
        mode=CaptureMode.ENFORCE if mode == "enforce" else CaptureMode.OBSERVE,
        current_stream=_current_stream(),
        current_handle=_current_handle() if _has_cuda() else None,
        reader=PageReader(_tensor_device, _pinned),
        ranks=lambda: _ranks(arguments),
        timing=_timing_device if _has_cuda() else None,
        become_poller=become_poller if _has_cuda() else None,
        on_open=_on_open,
    )
    for hazard, reason in UNSEEN.items():
        session.unobservable((hazard,), reason)
    arguments = {} if frame is None else {name: frame.f_locals.get(name) for name in ("tp_rank", "pp_rank", "dp_rank")}
    adapters = [*SGLANG_ADAPTERS, *_device_adapters(), *EXTRA_ADAPTERS]
    if read_text("tensor_syncs")[0] == "on":
        adapters += TENSOR_ADAPTERS
    if read_text("gpu_trace")[0] == "on" and _has_cuda():
        import torch
        import torch.cuda._gpu_trace

        start_gpu_trace(session, torch.cuda._gpu_trace, torch._C._activate_gpu_trace)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    installed = install(
        session,
        adapters,
        parse_version(text),
        lambda target, hook: HookRegistry.register(target, hook, HookType.AROUND),
    )
    INSTALLED.append(installed)
    _LOG.info("hicache-obs: %s, mode %s, %d hooks", session.engine, mode, len(installed.hooked))
    for target, found in installed.missing.items():
        _LOG.warning("hicache-obs: %s is %s in SGLang %s", target, found.value, text)
    return installed


def sglang_version() -> str:
    """Of the SGLang that runs here, or else of the one that is installed.

    Raises:
        PackageNotFoundError: There is none.
    """
    running = getattr(sys.modules.get("sglang"), "__version__", None)
    return running if isinstance(running, str) else version("sglang")


def describe_sglang() -> list[str]:
    """For ``doctor``: the installed SGLang, whether it will load this plugin, and which of its names are missing."""
    try:
        text = version("sglang")
    except PackageNotFoundError:
        return ["SGLang is not installed"]
    release = parse_version(text)
    rows = [row for row in SGLANG_ADAPTERS if release in row.versions]
    missing = [row for row in rows if not row.optional and resolve(row.target) is not Found.FUNCTION]
    lines = [f"SGLang {text}: {len(rows) - len(missing)} of {len(rows)} names to hook are there"]
    lines += [f"{row.target} is missing: not observable: {_names(row)}" for row in missing]
    if release < (0, 5, 11):
        lines.append("SGLang before 0.5.11 has no plugins: nothing is recorded there")
    return lines


def _names(row: Adapter) -> str:
    return ", ".join(hazard.value for hazard in row.hazards) or "nothing on its own"


def _on_open(session: Session) -> None:
    """The ring exists: hooks that the registry could not apply are known now."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    applied = getattr(HookRegistry, "_patched", None)
    for installed in INSTALLED:
        hazards = {row.target: row.hazards for row in (*SGLANG_ADAPTERS, *CUDA_ADAPTERS, *CPU_ADAPTERS)}
        for target in installed.hooked:
            if applied is not None and target not in applied:
                session.unobservable(hazards.get(target, ()), f"SGLang could not hook {target}")
        session.recorder.status("hooks", len(installed.hooked))
        registered = getattr(HookRegistry, "_hooks", {})
        shorten(session, [one for one in installed.hooks if len(registered.get(one[0].target, ())) == 1])
    if read_text("agent")[0] == "on":
        start_agent()


def _scheduler_frame() -> FrameType | None:
    """The frame of the scheduler's entry function, if that is what is loading plugins."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != SCHEDULER_ENTRY:
        frame = frame.f_back
    return frame


def _ranks(arguments: dict[str, Any]) -> Ranks:
    """From SGLang's context once it is published, else from what the scheduler was started with."""
    context = sys.modules.get("sglang.srt.runtime_context")
    try:
        parallel = context.get_parallel() if context is not None else None
        known = {name: getattr(parallel, name, None) for name in ("tp_rank", "pp_rank", "dp_rank")}
    except Exception:  # noqa: BLE001 not published yet
        known = {}
    values = {name: known.get(name) if isinstance(known.get(name), int) else arguments.get(name) for name in _RANKS}
    return Ranks(**{name.removesuffix("_rank"): int(value or 0) for name, value in values.items()})


_RANKS: Final = ("tp_rank", "pp_rank", "dp_rank")


def _device_module() -> Any:
    """The device module SGLang's controller uses; without one torch's, never initialising CUDA."""
    controller = sys.modules.get(_CONTROLLER)
    module = getattr(controller, "device_module", None)
    if module is not None:
        return module
    import torch

    return torch.cuda if torch.cuda.is_initialized() else torch.cpu


def _current_stream() -> Callable[[], Any]:
    """Asks for the current stream. The device module of SGLang's controller stays the same once it is there."""
    ask: Callable[[], Any] | None = None

    def current() -> Any:
        nonlocal ask
        if ask is None:
            module = getattr(sys.modules.get(_CONTROLLER), "device_module", None)
            if module is None:
                return _device_module().current_stream()
            ask = module.current_stream
        return ask()

    return current


def _current_handle() -> Callable[[], int | None] | None:
    """What torch asks for the handle when it launches a kernel: a stream object costs the thread 1 us each time.

    It gives ``None`` before CUDA is initialised.
    """
    import torch

    handle, device = (getattr(torch._C, f"_cuda_{name}", None) for name in ("getCurrentRawStream", "getDevice"))
    if handle is None or device is None:
        return None
    initialized: Callable[[], bool] = torch.cuda.is_initialized
    return lambda: int(handle(device())) if initialized() else None


def _timing_device() -> Device | None:
    """CUDA's event pairs; nothing where the engine does not run on CUDA."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    from hicache_obs.streams.cuda import CudaDevice

    return cast(Device, CudaDevice())


def _tensor_device() -> Any:
    import torch

    return torch.cuda


def _pinned(ids: int) -> Any:
    import torch

    # One that is made in inference mode can be written in that mode only; not every thread of a server is in it.
    with torch.inference_mode(False):
        return torch.empty(ids, dtype=torch.int64, pin_memory=True)


def _has_cuda() -> bool:
    """Whether this torch is built for CUDA (or ROCm, which calls itself that)."""
    import torch

    return bool(torch.version.cuda or torch.version.hip)


def _device_adapters() -> tuple[Adapter, ...]:
    return CUDA_ADAPTERS if _has_cuda() else CPU_ADAPTERS
