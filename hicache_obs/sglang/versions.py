"""Engine versions, compared: which hook belongs to which release."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from hicache_obs.errors import ConfigError

Version: TypeAlias = tuple[int, ...]
_RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)")


def parse_version(text: str) -> Version:
    """The release numbers of ``text``; what follows them (``.post1``, ``rc2``, ``+cu129``) does not count.

    Raises:
        ConfigError: ``text`` does not begin with numbers.
    """
    match = _RELEASE.match(text)
    if match is None:
        raise ConfigError(f"version {text!r}: must begin with a release such as 0.5.23")
    return tuple(int(part) for part in match[1].split("."))


@dataclass(frozen=True, slots=True)
class Versions:
    """A range of releases.

    Attributes:
        since: First release in it.
        before: First release after it; empty for every later one, known or not.
    """

    since: str = "0"
    before: str = ""

    def __contains__(self, version: Version) -> bool:
        return parse_version(self.since) <= version and (not self.before or version < parse_version(self.before))

    def __str__(self) -> str:
        return f"{self.since} to before {self.before}" if self.before else f"{self.since} and later"


ALL_VERSIONS = Versions()
