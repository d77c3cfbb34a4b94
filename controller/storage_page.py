"""What a page is outside of memory: its key, its bytes, and the header that says whether they are the right ones."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from hicache_obs.controller.pools import HostPool
from hicache_obs.controller.radix_node import Int64Array
from hicache_obs.errors import HicacheObsError

_MAGIC: Final = b"hicapage"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sHxxxxxxQq16s16s")
"""Magic, version, payload bytes, tag, writer, checksum."""
CHECKSUM_BYTES: Final = 16
NO_TAG: Final = -1


class BadPage(HicacheObsError):
    """Stored bytes are not the page they are named after."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredPage:
    """A page as it was stored.

    Attributes:
        payload: Contents, as ``HostPageMemory.read`` gave them.
        writer: Run that stored it.
        tag: What that run wanted to know about it; ``NO_TAG`` if nothing.
        checksum: Of all of this and the key, as the writer computed it.
    """

    payload: memoryview
    writer: bytes
    tag: int
    checksum: bytes


def page_keys(namespace: str, tokens: Int64Array, page_size: int) -> list[str]:
    """Key of each whole page of ``tokens``, ``(n,) int64``, from the start of a sequence.

    A key depends on all tokens up to the end of its page, and on ``namespace``, which must name everything else that
    the contents depend on: model, weights, dtype, page size.
    """
    keys: list[str] = []
    chain = hashlib.blake2b(namespace.encode(), digest_size=16).digest()
    whole = np.ascontiguousarray(tokens, np.int64)
    for end in range(page_size, len(whole) + 1, page_size):
        chain = hashlib.blake2b(chain + whole[end - page_size : end].tobytes(), digest_size=16).digest()
        keys.append(chain.hex())
    return keys


def checksum(key: str, payload: bytes | memoryview, writer: bytes, tag: int) -> bytes:
    """Of everything that makes a stored page."""
    digest = hashlib.blake2b(key.encode(), digest_size=CHECKSUM_BYTES)
    digest.update(struct.pack("<Qq", len(payload), tag))
    digest.update(writer)
    digest.update(payload)
    return digest.digest()


def pack_page(payload: bytes, writer: bytes, tag: int, digest: bytes) -> bytes:
    """What goes to storage; ``digest`` is the page's ``checksum``. Partner of ``unpack_page``."""
    return _HEADER.pack(_MAGIC, _VERSION, len(payload), tag, writer, digest) + payload


def unpack_page(data: bytes, size_bytes: int) -> StoredPage:
    """The page in ``data``, whose payload must have ``size_bytes``. Its checksum is not compared here.

    Raises:
        BadPage: ``data`` is no page, is cut short, or of another size or version.
    """
    if len(data) < _HEADER.size:
        raise BadPage(f"{len(data)} bytes; a page has {_HEADER.size + size_bytes}")
    magic, version, length, tag, writer, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise BadPage(f"no page of version {_VERSION}: it begins with {data[:10]!r}")
    if length != size_bytes or len(data) != _HEADER.size + length:
        raise BadPage(f"{len(data) - _HEADER.size} bytes of payload, {length} stated; expected {size_bytes}")
    return StoredPage(memoryview(data)[_HEADER.size :], writer, tag, digest)


class HostPageMemory:
    """Bytes of the host pool's pages. Any thread; who may touch which page when is the caller's business.

    Attributes:
        page_bytes: Of one page, all buffers and layers.
    """

    def __init__(self, pool: HostPool) -> None:
        self.page_bytes: Final = pool.layout.page_bytes
        self._parts: tuple[npt.NDArray[np.uint8], ...] = tuple(
            buffer.view(torch.uint8).numpy() for buffer in pool.buffers
        )
        self._ends = np.cumsum([part[:, 0].size for part in self._parts])

    def read(self, page: int) -> bytes:
        """A copy of the page's contents."""
        return b"".join(part[:, page].tobytes() for part in self._parts)

    def write(self, page: int, payload: bytes | memoryview) -> None:
        """Set the page's contents; ``payload`` has ``page_bytes``."""
        values = np.frombuffer(payload, np.uint8)
        for part, half in zip(self._parts, np.split(values, self._ends[:-1]), strict=True):
            part[:, page] = half.reshape(part[:, page].shape)
