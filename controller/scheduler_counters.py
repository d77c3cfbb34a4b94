"""What a scheduler tells of its work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a restored page came from; the demo matches wrong contents with findings through it.

    Attributes:
        device_page: Where it was restored to.
        step: Scheduler step that submitted the load-back.
    """

    device_page: int
    step: int


@dataclass(slots=True)
class SchedulerCounters:
    """What the scheduler did.

    Attributes:
        rounds, extend_rounds: Launched; prefill rounds among them.
        chunks: Rows of prefill rounds that were not the last of their prompt.
        finished, aborted, retractions: Requests.
        resumed_pages: Pages of retracted requests that were not computed again.
        output_tokens: Handled.
        admitted_tokens, device_hit_tokens, host_hit_tokens: Tokens of admitted requests, retracted ones that go on
            included; those of them whose KV was on the device, or in host memory.
    """

    rounds: int = 0
    extend_rounds: int = 0
    chunks: int = 0
    finished: int = 0
    aborted: int = 0
    retractions: int = 0
    resumed_pages: int = 0
    output_tokens: int = 0
    admitted_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
