"""A storage back end in memory: the same in every run, gone with the process."""

from __future__ import annotations


class MemoryBackend:
    """Pages by key. See ``StorageBackend``.

    Attributes:
        pages: What was written.
    """

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}

    def exists(self, key: str) -> bool:
        """See ``StorageBackend.exists``."""
        return key in self.pages

    def read(self, key: str) -> bytes | None:
        """See ``StorageBackend.read``."""
        return self.pages.get(key)

    def write(self, key: str, data: bytes) -> None:
        """See ``StorageBackend.write``."""
        self.pages[key] = data
