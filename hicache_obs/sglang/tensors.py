"""Hooks on the tensor methods that make the host wait: ``.item()``, ``.cpu()`` and ``.tolist()`` of a device tensor.

They see every tensor of the process, so they are installed only when asked for (``HICACHE_OBS_TENSOR_SYNCS``).
Without them such a wait is not recorded, and what it orders is reported as unordered.
"""

from __future__ import annotations

from typing import Any, Final

from hicache_obs.recorder.recorder import StreamMark
from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.session import IN_STREAM_CALL, Session
from hicache_obs.streams.protocol import Stream

_Begun = tuple[Stream, StreamMark | None]


def _before(session: Session, tensor: Any, *_: Any, **__: Any) -> _Begun | None:
    if tensor.device.type == "cpu":
        return None
    stream = session.current_stream()
    return stream, session.recorder.begin_stream_sync(stream)


def _after(session: Session, begun: _Begun | None, *_: Any, **__: Any) -> None:
    if begun is not None:
        session.recorder.end_stream_sync(*begun)


TENSOR_ADAPTERS: Final = tuple(
    Adapter(f"torch.Tensor.{name}", before=_before, after=_after, group=IN_STREAM_CALL, optional=True)
    for name in ("item", "cpu", "tolist")
)
