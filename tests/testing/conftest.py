"""Programs for exploration."""

from __future__ import annotations

import pytest

from hicache_obs.records import Direction, Mode, Work, device, page_ids
from hicache_obs.streams.protocol import Device, Stream


class Pages:
    """Launches operations that do nothing but say which pages they touch."""

    @staticmethod
    def write(dev: Device, stream: Stream, *pages: int, copy: bool = False, site: str = "write") -> None:
        """An operation on ``stream`` that writes ``pages``; a kernel, or a load-back copy."""
        direction = Direction.HOST_TO_DEVICE if copy else None
        with dev.stream(stream):
            dev.launch(_nothing, Work(site, (device(Mode.WRITE, page_ids(pages)),), direction=direction))

    @staticmethod
    def read(dev: Device, stream: Stream, *pages: int, site: str = "read") -> None:
        """A kernel on ``stream`` that reads ``pages``."""
        with dev.stream(stream):
            dev.launch(_nothing, Work(site, (device(Mode.READ, page_ids(pages)),)))


@pytest.fixture
def pages() -> Pages:
    """See ``Pages``."""
    return Pages()


def _nothing() -> None:
    pass
