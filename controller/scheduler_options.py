"""What one scheduler may do, and which policies it follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hicache_obs.controller.eviction import rank_named
from hicache_obs.errors import ConfigError

WRITE_POLICIES: Final = ("write_through", "write_through_selective", "write_back")
RETRACTIONS: Final = ("recompute", "backup")
BARRIERS: Final = ("private", "coarse", "read_done")


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Limits and policies of one scheduler.

    Attributes:
        max_running: Requests admitted at once.
        max_extend_rows, max_extend_tokens: Limits of one prefill round; without ``chunked_prefill`` one request may
            exceed the second.
        chunked_prefill: A prompt of more than ``max_extend_tokens`` new tokens takes several rounds, with a decode
            round in between if any request decodes.
        host_tier: Back prefixes up to host memory and restore them. Off: the reference run.
        write_policy: When a prefix is copied to host memory. ``write_through``: once it is computed.
            ``write_through_selective``: once ``write_threshold`` requests have used it. ``write_back``: when its
            device pages are evicted.
        write_threshold: See ``write_policy``.
        host_eviction: What host memory gives up first: one of ``eviction.EVICTION_POLICIES``.
        retraction: What becomes of a retracted request's full pages. ``recompute``: they are lost. ``backup``: they
            are copied to host memory, kept there, and restored when the request is resumed.
        early_backup: With ``write_through``: write a prompt back as soon as the round that computes it is launched,
            instead of when its result is handled. The host copy exists one round earlier, and nothing but the write
            fence keeps the copy from reading pages before they are written.
        poll_acks: Before a step, also release the transfers that a query shows to be complete. Their pages may be
            evicted up to ``ACK_DISTANCE`` steps earlier, but what the scheduler does then depends on device timing.
        barrier: What keeps the next round's metadata from overwriting what the round in flight still reads.
            ``private``: nothing is shared, each round brings its own. ``coarse``: the schedule stream waits for the
            whole round. ``read_done``: for the event behind the round's read of its metadata.

    Raises:
        ConfigError: A value is not allowed, or two do not go together.
    """

    max_running: int = 16
    max_extend_rows: int = 4
    max_extend_tokens: int = 4096
    chunked_prefill: bool = False
    host_tier: bool = True
    write_policy: str = "write_through"
    write_threshold: int = 2
    host_eviction: str = "lru"
    retraction: str = "recompute"
    early_backup: bool = False
    poll_acks: bool = False
    barrier: str = "private"

    def __post_init__(self) -> None:
        for name in ("max_running", "max_extend_rows", "max_extend_tokens", "write_threshold"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}: {value}; expected an integer ≥ 1")
        for name, allowed in (
            ("write_policy", WRITE_POLICIES),
            ("retraction", RETRACTIONS),
            ("barrier", BARRIERS),
        ):
            text = getattr(self, name)
            if text not in allowed:
                raise ConfigError(f"{name}: {text!r}; expected one of {', '.join(allowed)}")
        rank_named(self.host_eviction)
        if self.early_backup and self.write_policy != "write_through":
            raise ConfigError(f"early_backup: True; expected False with write_policy {self.write_policy!r}")
