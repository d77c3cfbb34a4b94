"""Mode ``enforce``: the fence a release lacks, issued before each transfer that nobody has fenced.

The transfer stream waits for the whole forward stream, which is what SGLang itself does in the releases that have
the fence. It is never issued where the controller has one.
"""

from __future__ import annotations

from typing import Any

from hicache_obs.records import Purpose
from hicache_obs.sglang.session import Session


def add_load_fence(session: Session, stream: Any) -> None:
    """Make ``stream``, on which a load-back is about to be submitted, wait for the launched forward rounds."""
    _add(session, stream, Purpose.LOAD_FENCE, "load")


def add_write_fence(session: Session, stream: Any) -> None:
    """Make ``stream``, on which a write-back is about to be submitted, wait for the launched forward rounds."""
    _add(session, stream, Purpose.WRITE_FENCE, "write")


def _add(session: Session, stream: Any, purpose: Purpose, protects: str) -> None:
    forward = session.forward_stream
    if forward is None or session.stream(forward).stream_id == session.stream(stream).stream_id:
        return  # nothing was launched yet, or the transfer is on the forward stream itself
    outer: Purpose | None = session.local.purpose
    session.local.purpose = purpose
    try:
        stream.wait_stream(forward)
    finally:
        session.local.purpose = outer
    session.count_fence(protects)
