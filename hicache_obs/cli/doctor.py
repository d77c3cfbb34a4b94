"""``hicache-obs doctor``: versions, settings with their source, and what cannot be seen on this machine."""

from __future__ import annotations

import difflib
import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Final

import click

from hicache_obs import __version__
from hicache_obs.cli.layout import fit
from hicache_obs.config import SETTINGS, Setting, TextSetting, read_any, read_text
from hicache_obs.errors import ConfigError
from hicache_obs.findings import ExitCode
from hicache_obs.recorder.ring_directory import open_ring_directory

PACKAGES: Final = ("torch", "numpy", "nvtx", "pyarrow", "prometheus-client", "opentelemetry-sdk", "msgspec")


@click.command("doctor")
def command() -> int:
    """Show what runs here, every setting with where it comes from, and the blind spots.

    Exit code 2 if the environment has a value that is not allowed; a name that is no setting is shown as well.
    """
    for title, lines in (
        ("Versions", _versions()),
        ("Settings", _settings()),
        ("Devices", _devices()),
        ("NVTX ranges", _ranges()),
        ("SGLang", _sglang()),
        ("Blind spots", _blind_spots()),
    ):
        click.echo(title)
        for line in lines:
            click.echo(fit(f"  {line}", indent=6))
    return int(ExitCode.BAD_INPUT if any(_fault(setting) for setting in SETTINGS) else ExitCode.CLEAN)


def _versions() -> Iterator[str]:
    yield f"hicache-obs {__version__}, Python {platform.python_version()}, {platform.platform()}"
    for package in PACKAGES:
        yield f"{package} {_installed(package) or 'is not installed'}"
    yield from _extras()


def _installed(package: str) -> str:
    """Version of a package, empty if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _extras() -> Iterator[str]:
    """Which extras of this package are there; of the others, what is missing."""
    lacking: dict[str, list[str]] = {}
    for requirement in (requires("hicache-obs") or ()) if _installed("hicache-obs") else ():
        found = re.match(r"""([\w.-]+).*\bextra == ["'](?!dev)([\w-]+)""", requirement)
        if found is not None:
            missing = lacking.setdefault(found[2], [])
            missing += [] if _installed(found[1]) else [found[1]]
    yield f"extras: {', '.join(extra for extra, missing in lacking.items() if not missing) or 'none'}"
    for extra, missing in lacking.items():
        if missing:
            yield f"without the extra {extra}: {', '.join(missing)} not installed; pip install 'hicache-obs[{extra}]'"


def _settings() -> Iterator[str]:
    for setting in SETTINGS:
        fault = _fault(setting)
        if fault:
            yield f"{fault}"
            yield f"    {setting.purpose}"
            continue
        value, source = read_any(setting)
        origin = "default" if source == "default" else "from the environment"
        shown = f"{value} {setting.unit}".strip() or "none"
        yield f"{setting.variable} = {shown} ({origin}; {setting.allowed})"
        yield f"    {setting.purpose}"

    variables = [setting.variable for setting in SETTINGS]
    for name in sorted(name for name in os.environ if name.startswith("HICACHE_OBS") and name not in variables):
        near = difflib.get_close_matches(name, variables, n=1)
        yield f"{name} is set in the environment and is no setting" + (f"; did you mean {near[0]}?" if near else "")


def _fault(setting: Setting | TextSetting) -> str:
    """What is wrong with the environment's value of a setting; empty if nothing is."""
    try:
        read_any(setting)
    except ConfigError as error:
        return str(error)
    return ""


def _devices() -> Iterator[str]:
    if importlib.util.find_spec("torch") is None:
        yield "no torch: nothing can run here, files can be checked"
        return
    import torch

    if torch.cuda.is_available():
        yield f"cuda: {torch.cuda.get_device_name()}"
    else:
        yield "cuda: not available; 'auto' runs on worker threads"
    yield f"threads: yes, on {os.cpu_count()} cores"
    yield "virtual: yes"


def _ranges() -> Iterator[str]:
    from hicache_obs.recorder.nvtx_ranges import describe

    yield describe()


def _sglang() -> Iterator[str]:
    """What the plugin finds here, and why it may not be loaded."""
    from hicache_obs.sglang.install import describe_sglang

    yield from describe_sglang()
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and "hicache_obs" not in [name.strip() for name in allowed.split(",")]:
        yield f"SGLANG_PLUGINS={allowed} leaves hicache_obs out: nothing will be recorded"
    if os.environ.get("HICACHE_OBS", "off") == "off":
        yield "HICACHE_OBS is off: the plugin does nothing"
    elif os.path.lexists(read_text("ring_dir")[0]):
        try:
            open_ring_directory(create=False)
        except ConfigError as error:
            yield f"nothing will be recorded: {error}"


def _blind_spots() -> Iterator[str]:
    from hicache_obs.sglang.blind_spots import SEEN_NEVER

    yield "the order of work that other libraries launch themselves (NCCL, raw driver calls) is not seen"
    yield "accesses outside the two KV pools and the index buffers are not seen"
    yield "remote transfers are judged in files, the demo's engine has none; of collectives, those it records itself"
    yield from (f"SGLang: not seen are {text}" for text in SEEN_NEVER)
    yield "SGLang: events and streams used by torch's C++ code are seen only with HICACHE_OBS_GPU_TRACE=on"
    yield "SGLang: Tensor.item, .cpu and .tolist are seen only with HICACHE_OBS_TENSOR_SYNCS=on"
    yield "SGLang: pages are judged whole; two requests' slots in one page look like a conflict"
    yield "a forward round's interval is the whole segment's; single accesses inside it have no times"
