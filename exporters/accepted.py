"""Findings that somebody has decided to live with for now: ``accepted.toml``.

::

    [HC-3f9a1b2c]
    reason = "fixed upstream by the next image"
    expires = 2027-03-31

Both keys are required. An acceptance holds to the end of that day, UTC; after it the finding counts again.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hicache_obs.errors import ConfigError
from hicache_obs.findings import Finding, Verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_BYTES: Final = 1 << 20
_FINGERPRINT: Final = re.compile(r"HC-[0-9a-f]{8}")
_ALLOWED: Final = 'expected a table per fingerprint, [HC-xxxxxxxx], with reason = "..." and expires = YYYY-MM-DD'


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One accepted fingerprint.

    Attributes:
        reason: In the user's words.
        expires: Last day on which it holds, UTC.
    """

    fingerprint: str
    reason: str
    expires: datetime.date


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.timezone.utc).date()


class Accepted:
    """All acceptances of one file; safe on any thread.

    Args:
        entries: By fingerprint.
        today: The date now, UTC.
    """

    def __init__(
        self, entries: Mapping[str, Acceptance] | None = None, *, today: Callable[[], datetime.date] = _today
    ) -> None:
        self._entries = dict(entries or {})
        self._today = today

    def get(self, fingerprint: str) -> Acceptance | None:
        """The acceptance of ``fingerprint`` that holds today, ``None`` without one."""
        found = self._entries.get(fingerprint)
        return found if found is not None and self._today() <= found.expires else None

    def of(self, finding: Finding) -> Acceptance | None:
        """The acceptance of ``finding`` that holds today; a pair that could not be judged has none."""
        return None if finding.verdict is Verdict.UNKNOWN else self.get(finding.fingerprint)

    def covers(self, fingerprint: str) -> bool:
        """Whether ``fingerprint`` is accepted today."""
        return self.get(fingerprint) is not None

    def expired(self) -> list[str]:
        """A sentence for each acceptance that holds no longer."""
        today = self._today()
        return [
            f"{entry.fingerprint}: its acceptance expired on {entry.expires}; it counts again"
            for entry in self._entries.values()
            if entry.expires < today
        ]


def read_accepted(path: Path, *, today: Callable[[], datetime.date] = _today) -> Accepted:
    """The acceptances in ``path``.

    Raises:
        ConfigError: It cannot be read, or is not what this module's docstring says.
    """
    where = f"--accepted {path}"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; expected a readable TOML file") from None
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where}: larger than {MAX_BYTES} bytes; {_ALLOWED}")
    try:
        tables = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not TOML ({error}); {_ALLOWED}") from None
    return Accepted({name: _entry(where, name, table) for name, table in tables.items()}, today=today)


def _entry(where: str, name: str, table: Any) -> Acceptance:
    if not _FINGERPRINT.fullmatch(name):
        raise ConfigError(f"{where}: {name!r} is not a fingerprint; {_ALLOWED}")
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {name} is not a table; {_ALLOWED}")
    missing = [key for key in ("reason", "expires") if key not in table]
    unknown = [key for key in table if key not in ("reason", "expires")]
    if missing or unknown:
        problem = f"has no {missing[0]!r}" if missing else f"has an unknown key {unknown[0]!r}"
        raise ConfigError(f"{where}: {name} {problem}; {_ALLOWED}")
    reason, expires = table["reason"], table["expires"]
    if not isinstance(reason, str) or not reason.strip():
        raise ConfigError(f"{where}: {name}: reason is {reason!r}; expected a sentence that says why")
    if isinstance(expires, datetime.datetime) or not isinstance(expires, datetime.date):
        raise ConfigError(f"{where}: {name}: expires is {expires!r}; expected a date without quotes, YYYY-MM-DD")
    return Acceptance(name, reason, expires)
