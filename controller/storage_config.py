"""Settings of the storage tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hicache_obs.errors import ConfigError

PREFETCH_POLICIES: Final = ("best_effort", "wait", "timeout")


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Where the third tier is, and how much it may do.

    Attributes:
        url: Folder or fsspec URL.
        prefetch: What a request does whose prefix is on its way. ``best_effort``: it waits for nothing, and takes
            what is there when it can be admitted. ``wait``: it waits for all of it. ``timeout``: for ``timeout_ms``
            at most.
        timeout_ms: See ``prefetch``.
        least_pages: Fewer missing pages are not worth a look into storage.
        lookahead: So many waiting requests, the next ones, are looked up.
        max_prefetch_pages: Host pages that prefetches may fill at once; 0 for half of the pool.
        max_backup_pages: Host pages that may wait for their backup; more are not backed up.
        batch_pages: Pages between two looks whether an operation was cancelled.
        read_bytes_per_s, write_bytes_per_s: Most that each direction moves; 0 for no limit.
        close_timeout_s: How long the end waits for what is queued.
        max_restarts: So often a thread that died is replaced; then the tier is switched off.

    Raises:
        ConfigError: A value is not allowed.
    """

    url: str
    prefetch: str = "timeout"
    timeout_ms: int = 1000
    least_pages: int = 1
    lookahead: int = 4
    max_prefetch_pages: int = 0
    max_backup_pages: int = 4096
    batch_pages: int = 8
    read_bytes_per_s: int = 0
    write_bytes_per_s: int = 0
    close_timeout_s: float = 30.0
    max_restarts: int = 3

    def __post_init__(self) -> None:
        if self.prefetch not in PREFETCH_POLICIES:
            raise ConfigError(f"storage prefetch: {self.prefetch!r}; expected one of {', '.join(PREFETCH_POLICIES)}")
        lowest = {"least_pages": 1, "lookahead": 1, "batch_pages": 1, "max_backup_pages": 1}
        names = ("timeout_ms", "max_prefetch_pages", "read_bytes_per_s", "write_bytes_per_s", "max_restarts")
        for name, low in {**dict.fromkeys(names, 0), **lowest}.items():
            if getattr(self, name) < low:
                raise ConfigError(f"storage {name}: {getattr(self, name)}; expected an integer ≥ {low}")
        if not self.close_timeout_s > 0:
            raise ConfigError(f"storage close_timeout_s: {self.close_timeout_s}; expected a number > 0")
