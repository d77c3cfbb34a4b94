"""A bounded queue of finished spans that gives up ordinary ones first. Putting never blocks for long."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class SpanQueue(Generic[T]):
    """Two lines behind one limit: those of traces with a finding leave first and are dropped last.

    Args:
        capacity: Spans in both lines together.
        on_drop: Told of each one that is dropped to make room, on the thread that puts.
    """

    def __init__(self, capacity: int, on_drop: Callable[[T], None]) -> None:
        self._capacity = capacity
        self._on_drop = on_drop
        self._lock = threading.Lock()
        self._kept: deque[T] = deque()
        self._rest: deque[T] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._kept) + len(self._rest)

    def put(self, spans: Iterable[T], *, kept: bool) -> None:
        """Add ``spans``. In a full queue the oldest ordinary one goes; if there is none, the new one does."""
        dropped = []
        with self._lock:
            for span in spans:
                if self._closed or (len(self) >= self._capacity and not self._rest):
                    dropped.append(span)
                    continue
                if len(self) >= self._capacity:
                    dropped.append(self._rest.popleft())
                (self._kept if kept else self._rest).append(span)
        for span in dropped:
            self._on_drop(span)

    def put_back(self, spans: Iterable[T]) -> list[T]:
        """Return spans of traces with a finding that were taken and not delivered; returns those that do not fit."""
        refused = []
        with self._lock:
            for span in reversed(list(spans)):
                if len(self) < self._capacity:
                    self._kept.appendleft(span)
                else:
                    refused.append(span)
        return refused

    def take(self, limit: int) -> list[T]:
        """Up to ``limit`` spans, those of traces with a finding first; none if there are none."""
        with self._lock:
            found = [self._kept.popleft() for _ in range(min(limit, len(self._kept)))]
            found += [self._rest.popleft() for _ in range(min(limit - len(found), len(self._rest)))]
            return found

    def close(self) -> None:
        """Take nothing more; what is in it can still be taken."""
        with self._lock:
            self._closed = True
