"""One table of settings: name, environment variable, default, what is allowed. ``hicache-obs doctor`` prints it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from hicache_obs.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Setting:
    """One integer setting.

    Attributes:
        name: How code asks for it.
        variable: Environment variable that overrides the default.
        default, low, high: Default and inclusive limits.
        unit: Of the value.
        purpose: What it decides, for ``doctor``.
        power_of_two: Only powers of two are allowed.
    """

    name: str
    variable: str
    default: int
    low: int
    high: int
    unit: str
    purpose: str
    power_of_two: bool = False

    @property
    def allowed(self) -> str:
        """The values it takes, in words."""
        kind = "a power of two" if self.power_of_two else "an integer"
        return f"{kind} from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class TextSetting:
    """One setting that is a path, an address or a word.

    Attributes:
        name: How code asks for it.
        variable: Environment variable that overrides the default.
        default: The default, as the environment has it.
        kind: What it is, in words; what is allowed, unless there are ``choices``.
        purpose: What it decides, for ``doctor``.
        choices: All values it takes; empty for any text that is not empty.
    """

    name: str
    variable: str
    default: Callable[[Mapping[str, str]], str]
    kind: str
    purpose: str
    choices: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """Texts have none."""
        return ""

    @property
    def allowed(self) -> str:
        """The values it takes, in words."""
        return " or ".join(self.choices) if self.choices else self.kind


def _ring_directory(environment: Mapping[str, str]) -> str:
    runtime = environment.get("XDG_RUNTIME_DIR")
    return f"{runtime.rstrip('/')}/hicache-obs" if runtime else f"/tmp/hicache-obs-{os.geteuid()}"


def _none(_environment: Mapping[str, str]) -> str:
    return ""


SETTINGS: Final[tuple[Setting | TextSetting, ...]] = (
    Setting(
        "ring_slots", "HICACHE_OBS_RING_SLOTS", 1 << 16, 1 << 6, 1 << 24, "records", "records a ring file holds", True
    ),
    Setting(
        "arena_ids", "HICACHE_OBS_ARENA_IDS", 1 << 20, 1 << 10, 1 << 28, "page ids", "page ids a ring file holds", True
    ),
    Setting("poll_ms", "HICACHE_OBS_POLL_MS", 100, 10, 60_000, "ms", "how often the agent reads the rings"),
    Setting(
        "read_ids",
        "HICACHE_OBS_READ_IDS",
        1 << 16,
        0,
        1 << 24,
        "page ids",
        "pages a forward round may read to be recorded with them (plugin)",
    ),
    Setting(
        "link_gb_s",
        "HICACHE_OBS_LINK_GB_S",
        512,
        1,
        1 << 16,
        "GB/s",
        "no copy between host and device is faster: one that looks so ran on another stream (plugin)",
    ),
    TextSetting(
        "mode",
        "HICACHE_OBS",
        lambda _: "off",
        "a word",
        "what the plugin does in a server: nothing, record, or record and issue missing fences",
        ("off", "observe", "enforce"),
    ),
    TextSetting(
        "agent",
        "HICACHE_OBS_AGENT",
        lambda _: "on",
        "a word",
        "whether the plugin starts the node's agent if none runs",
        ("on", "off"),
    ),
    TextSetting(
        "processes",
        "HICACHE_OBS_PROCESSES",
        lambda _: "scheduler",
        "a word",
        "which processes the plugin hooks: the server's schedulers, or every one that loads plugins",
        ("scheduler", "all"),
    ),
    TextSetting(
        "tensor_syncs",
        "HICACHE_OBS_TENSOR_SYNCS",
        lambda _: "off",
        "a word",
        "whether the plugin also records Tensor.item, .cpu and .tolist of device tensors as waits of the host",
        ("off", "on"),
    ),
    TextSetting(
        "gpu_trace",
        "HICACHE_OBS_GPU_TRACE",
        lambda _: "off",
        "a word",
        "whether the plugin also records what torch's C++ code does with events and streams",
        ("off", "on"),
    ),
    TextSetting("ring_dir", "HICACHE_OBS_DIR", _ring_directory, "a directory", "where rings are written and found"),
    Setting("port", "HICACHE_OBS_PORT", 9464, 0, 65535, "", "port of the agent's metrics, 0 for any free one"),
    TextSetting("bind", "HICACHE_OBS_BIND", lambda _: "127.0.0.1", "a local address", "address of the agent's metrics"),
    TextSetting("tls_cert", "HICACHE_OBS_TLS_CERT", _none, "a file", "certificate of the agent's port, PEM"),
    TextSetting("tls_key", "HICACHE_OBS_TLS_KEY", _none, "a file", "its key, PEM, not encrypted"),
    TextSetting("token_file", "HICACHE_OBS_TOKEN_FILE", _none, "a file", "holds the bearer token of the agent's port"),
    TextSetting(
        "basic_auth_file", "HICACHE_OBS_BASIC_AUTH_FILE", _none, "a file", "lines of user:password for the agent's port"
    ),
    TextSetting(
        "created",
        "HICACHE_OBS_CREATED",
        lambda _: "on",
        "",
        "whether OpenMetrics scrapes say since when each counter counts: one more series per counter",
        ("on", "off"),
    ),
    TextSetting(
        "journal", "HICACHE_OBS_JOURNAL", _none, "a directory", "where the agent and the demo keep all records"
    ),
    Setting(
        "journal_max_bytes",
        "HICACHE_OBS_JOURNAL_MAX_BYTES",
        1 << 28,
        1 << 16,
        1 << 50,
        "bytes",
        "size of the journals of one rank; the oldest records go first",
    ),
    Setting(
        "agent_cpu_percent",
        "HICACHE_OBS_AGENT_CPU_PERCENT",
        50,
        1,
        100,
        "% of a core",
        "what the agent may use; what it cannot judge in time is left out and counted",
    ),
    TextSetting(
        "finished",
        "HICACHE_OBS_FINISHED",
        lambda _: "move",
        "",
        "what becomes of rings that were read to their end",
        ("move", "keep"),
    ),
    Setting(
        "finished_rings",
        "HICACHE_OBS_FINISHED_RINGS",
        16,
        0,
        100_000,
        "files",
        "moved rings that are kept in the folder 'finished'; the oldest go first",
    ),
    TextSetting(
        "accepted", "HICACHE_OBS_ACCEPTED", lambda _: "", "a file", "findings that are accepted for now (TOML)"
    ),
    TextSetting(
        "events", "HICACHE_OBS_EVENTS", lambda _: "", "a file", "where the agent writes findings as JSON lines"
    ),
    Setting(
        "events_max_bytes",
        "HICACHE_OBS_EVENTS_MAX_BYTES",
        1 << 24,
        1 << 12,
        1 << 40,
        "bytes",
        "size at which that file is put aside as <name>.1, which it replaces",
    ),
    Setting(
        "events_interval_s",
        "HICACHE_OBS_EVENTS_INTERVAL_S",
        60,
        1,
        86_400,
        "s",
        "a finding that comes again has one line in so many seconds",
    ),
    Setting(
        "span_one_in",
        "HICACHE_OBS_SPAN_ONE_IN",
        100,
        0,
        1 << 31,
        "traces",
        "of traces without a finding, one in so many is sent by OTLP; 0 for none",
    ),
    Setting(
        "span_queue",
        "HICACHE_OBS_SPAN_QUEUE",
        1 << 14,
        1 << 6,
        1 << 24,
        "spans",
        "spans that wait to be sent; ordinary ones are dropped and counted first",
    ),
)
_BY_NAME: Final = {setting.name: setting for setting in SETTINGS}


def read_setting(name: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Value of an integer setting and where it comes from: ``default`` or the variable's name.

    Raises:
        ConfigError: The variable does not hold an integer inside the limits.
    """
    setting = _BY_NAME[name]
    assert isinstance(setting, Setting)
    text = (os.environ if environment is None else environment).get(setting.variable)
    if text is None:
        return setting.default, "default"
    allowed = f"expected {setting.allowed}"
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{setting.variable}: {text!r}; {allowed}") from None
    if not setting.low <= value <= setting.high or (setting.power_of_two and value & (value - 1)):
        raise ConfigError(f"{setting.variable}: {value}; {allowed}")
    return value, setting.variable


def read_text(name: str, environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Value of a text setting and where it comes from: ``default`` or the variable's name.

    Raises:
        ConfigError: The variable is empty, or holds none of the choices.
    """
    setting = _BY_NAME[name]
    assert isinstance(setting, TextSetting)
    values = os.environ if environment is None else environment
    text = values.get(setting.variable)
    if text is None:
        return setting.default(values), "default"
    if not text or (setting.choices and text not in setting.choices):
        raise ConfigError(f"{setting.variable}: {text!r}; expected {setting.allowed}")
    return text, setting.variable


_OF_STORES: Final = "the driver reads them from its environment variables or from fsspec's configuration files"


def refuse_password(address: str, what: str, *, instead: str = _OF_STORES, anywhere: bool = False) -> None:
    """Refuse an address that holds a user or a password: process lists, logs and reports would show it.

    Args:
        address: A path or URL.
        what: What it is the address of.
        instead: Where they belong.
        anywhere: Refuse every ``@``. Else one in a path is the name of a file, as is all of an address without ``://``.

    Raises:
        ConfigError: There is one; the message does not repeat it.
    """
    scheme, separator, rest = address.partition("://")
    if "@" in (address if anywhere else rest.partition("/")[0]):
        shown = f" {scheme}://..." if separator and "@" not in scheme else ""
        raise ConfigError(
            f"{what}{shown}: no user or password in the address, which shows in process lists and logs; {instead}"
        )


def read_any(setting: Setting | TextSetting, environment: Mapping[str, str] | None = None) -> tuple[int | str, str]:
    """Value of any setting and where it comes from.

    Raises:
        ConfigError: The variable's value is not allowed.
    """
    read = read_setting if isinstance(setting, Setting) else read_text
    return read(setting.name, environment)
