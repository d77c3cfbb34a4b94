"""One table of settings: name, environment variable, default, what is allowed. ``hicache-obs doctor`` prints it."""

from __future__ import annotations

import os
from collections.abc import Mapping
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


SETTINGS: Final = (
    Setting(
        "ring_slots", "HICACHE_OBS_RING_SLOTS", 1 << 16, 1 << 6, 1 << 24, "records", "records a ring file holds", True
    ),
    Setting(
        "arena_ids", "HICACHE_OBS_ARENA_IDS", 1 << 20, 1 << 10, 1 << 28, "page ids", "page ids a ring file holds", True
    ),
    Setting("poll_ms", "HICACHE_OBS_POLL_MS", 100, 10, 60_000, "ms", "how often the agent reads the ring"),
)
_BY_NAME: Final = {setting.name: setting for setting in SETTINGS}


def read_setting(name: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Value of a setting and where it comes from: ``default`` or the variable's name.

    Raises:
        ConfigError: The variable does not hold an integer inside the limits.
    """
    setting = _BY_NAME[name]
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
