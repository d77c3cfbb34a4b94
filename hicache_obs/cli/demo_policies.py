"""Options of ``hicache-obs demo`` that choose the engine's policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from hicache_obs.errors import ConfigError

if TYPE_CHECKING:
    from hicache_obs.controller.scheduler_options import SchedulerOptions
    from hicache_obs.controller.storage_config import StorageConfig

FENCES: Final = ("none", "stream", "page")
WRITE_POLICIES: Final = ("write_through", "write_through_selective", "write_back")
EVICTIONS: Final = ("lru", "lfu", "priority")
RETRACTIONS: Final = ("recompute", "backup")
BARRIERS: Final = ("private", "coarse", "read_done")
PREFETCHES: Final = ("best_effort", "wait", "timeout")
"""The names are those of ``hicache_obs.controller``, which imports torch."""
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class DemoPolicies:
    """What the policy options say; ``None`` is the engine's default.

    Attributes:
        write_fence: What write-backs wait for, and who overwrites pages that one still reads; ``None``: as ``--fence``.
        write_policy, host_eviction, retraction, barrier: As of ``SchedulerOptions``.
        chunk_tokens: New tokens of one prefill round; longer prompts take several.
        storage: URL of a third tier.
        prefetch: As of ``StorageConfig``.
    """

    write_fence: str | None = None
    write_policy: str | None = None
    host_eviction: str | None = None
    retraction: str | None = None
    barrier: str | None = None
    chunk_tokens: int | None = None
    storage: str | None = None
    prefetch: str | None = None

    def scheduler(self, **limits: Any) -> SchedulerOptions:
        """The engine's options: ``limits``, and what was asked for."""
        from hicache_obs.controller.scheduler_options import SchedulerOptions

        for name in ("write_policy", "host_eviction", "retraction", "barrier"):
            if getattr(self, name) is not None:
                limits[name] = getattr(self, name)
        if self.chunk_tokens is not None:
            limits |= {"chunked_prefill": True, "max_extend_tokens": self.chunk_tokens}
        return SchedulerOptions(**limits)

    def storage_config(self) -> StorageConfig | None:
        """Settings of the third tier, ``None`` if none was asked for.

        Raises:
            ConfigError: ``--prefetch`` without ``--storage``, or storage that cannot be used.
        """
        from hicache_obs.controller.storage_backend import open_backend
        from hicache_obs.controller.storage_config import StorageConfig

        if self.storage is None:
            if self.prefetch is not None:
                raise ConfigError(f"--prefetch {self.prefetch}: there is no storage; expected --storage URL with it")
            return None
        open_backend(self.storage)
        return StorageConfig(self.storage) if self.prefetch is None else StorageConfig(self.storage, self.prefetch)


def policy_options(command: _F) -> _F:
    """Adds the options; ``command`` gets each as a keyword, as ``DemoPolicies`` takes them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS: Final = (
    click.option(
        "--write-fence", type=click.Choice(FENCES),
        help="What write-backs wait for, and who overwrites pages that one of them still reads; default: as --fence.",
    ),
    click.option(
        "--write-policy", type=click.Choice(WRITE_POLICIES),
        help="When a prefix is copied to host memory: computed, used often, or evicted.  [default: write_through]",
    ),
    click.option(
        "--host-eviction", type=click.Choice(EVICTIONS),
        help="What host memory gives up first.  [default: lru]",
    ),
    click.option(
        "--retraction", type=click.Choice(RETRACTIONS),
        help="Whether a retracted request's pages are computed again or kept in host memory.  [default: recompute]",
    ),
    click.option(
        "--barrier", type=click.Choice(BARRIERS),
        help="Rounds bring their own metadata, or share them behind a barrier in one of two forms.  "
        "[default: private]",
    ),
    click.option(
        "--chunk-tokens", type=click.IntRange(min=1), metavar="N",
        help="New tokens of one prefill round at most; longer prompts take several.",
    ),
    click.option(
        "--storage", metavar="DIR|URL",
        help="A third tier: a folder, or a URL that fsspec knows (needs the extra 'storage').",
    ),
    click.option(
        "--prefetch", type=click.Choice(PREFETCHES),
        help="How long a request waits for its prefix from storage.  [default: timeout]",
    ),
)  # fmt: skip
