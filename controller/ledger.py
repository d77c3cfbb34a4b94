"""The truth about page contents, kept apart from the pools.

A *tenancy* is one stay of some contents on a device page. The forward pass adds a digest of every token it
writes to the tenancy it writes for. A page that was restored from host memory is a new tenancy whose contents
were produced under an older one, its *source*; right before a round reads the page, it recomputes the digest
from the pool's memory and compares. A page spoiled by a race is thus caught in the act, with no record, event or
synchronisation added, and whether or not any detector is on.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from hicache_obs.controller.pools import synchronize
from hicache_obs.errors import ControllerError

Int64Array = npt.NDArray[np.int64]

MAX_PAGE_SIZE: Final = 4096
"""Most tokens per page."""
MAX_TOKEN_WORDS: Final = 16384
"""Most words of K of one token at one layer; an 8-byte element counts as two."""

_SEED: Final = 36738
_WORDS: Final = {8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class ContentLedger:
    """Digests of what each tenancy holds, and which tenancies were read with other contents.

    ``open`` and ``corrupted`` are for the host. ``add_tokens``, ``set_pages`` and ``check_pages`` run inside functions
    launched on the forward stream, and on no other: they update in place without a lock. They never block the host.

    A digest is Σ word · weight(slot) · weight(place in the token) modulo 2⁶⁴ with odd weights, so it tells any
    two pages that differ in one word apart, and others but for a chance of about 2⁻³² at worst. Words
    are 32 bits: floats that hold small integers differ in their top bits only, and a sum of whole 64-bit
    patterns would have no more than those few bits to differ in.

    Attributes:
        layers, capacity: Of the tensors.
        digests: ``(capacity, layers) int64``, device, contiguous: what was written under each tenancy.
        bad: ``(capacity,) int32``, device: layer checks of the tenancy that failed.
        checks: Page checks run so far, one per page and layer; host memory. Read it after a synchronisation.
    """

    def __init__(self, layers: int, capacity: int, torch_device: str | torch.device) -> None:
        """Room for ``capacity`` tenancies over the whole run; an id is never used twice."""
        if layers < 1 or capacity < 1:
            raise ControllerError(f"ledger: {layers} layers, capacity {capacity}; expected integers ≥ 1")
        device = torch.device(torch_device)
        self.layers = layers
        self.capacity = capacity
        self.digests = torch.zeros(capacity, layers, dtype=torch.int64, device=device)
        self.bad = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.checks = 0
        self._device = device
        self._opened = 0
        generator = torch.Generator().manual_seed(_SEED)
        self._slot_weights = _odd((MAX_PAGE_SIZE,), generator).to(device)
        self._word_weights = _odd((2, MAX_TOKEN_WORDS), generator).to(device)
        self._row_weights: Int64Array = np.empty(0, np.int64)
        synchronize(device)

    @property
    def opened(self) -> int:
        """Tenancies handed out so far."""
        return self._opened

    def open(self, n: int) -> Int64Array:
        """``(n,) int64`` ids of new tenancies, increasing. Host only.

        Raises:
            ControllerError: The ledger has no room for ``n`` more.
        """
        left = self.capacity - self._opened
        if not 0 <= n <= left:
            raise ControllerError(
                f"ledger: {n} tenancies asked for, {left} of {self.capacity} are left; "
                f"choose a capacity for every page the whole run will fill or restore"
            )
        first, self._opened = self._opened, self._opened + n
        return np.arange(first, self._opened, dtype=np.int64)

    def add_tokens(
        self,
        layer: int,
        tenancies: Int64Array | torch.Tensor,
        slots_in_page: Int64Array | torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Note tokens that the current launched function writes at ``layer``.

        Args:
            tenancies, slots_in_page: ``(t,) int64``, host array or device tensor: where each token goes. A slot
                is written once per tenancy.
            k, v: ``(t, heads, head_dim)``, device, the pool's dtype.
        """
        if not len(tenancies):
            return
        weights = self._slot_weights[self._on_device(slots_in_page)]
        digests = self._token_digests(k, 0).add_(self._token_digests(v, 1)).mul_(weights)
        self.digests[:, layer].index_add_(0, self._on_device(tenancies), digests)

    def add_rows(
        self,
        first: int,
        tenancies: Int64Array,
        slots_in_page: Int64Array,
        k: npt.NDArray[np.float64],
        v: npt.NDArray[np.float64],
    ) -> None:
        """``add_tokens`` of one token for each of ``n`` different tenancies, in host memory: a decode round's.

        Args:
            first: Layer of ``k[0]``.
            tenancies, slots_in_page: ``(n,) int64``.
            k, v: ``(layers, n, width)``.
        """
        words = np.concatenate((k, v), 2).view(np.int32).astype(np.int64)
        width = words.shape[2]
        if width != len(self._row_weights):
            if width > 2 * MAX_TOKEN_WORDS:
                raise ControllerError(f"ledger: {width // 2} words per token; at most {MAX_TOKEN_WORDS} are supported")
            self._row_weights = self._word_weights[:, : width // 2].numpy().ravel()
        weights = self._slot_weights.numpy()[slots_in_page]
        digests = (words @ self._row_weights) * weights
        self.digests.numpy()[tenancies, first : first + len(k)] += digests.T

    def check_pages(
        self,
        layer: int,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        tenancies: Int64Array | torch.Tensor,
        sources: Int64Array | torch.Tensor,
        *,
        counted: bool = True,
    ) -> None:
        """Compare what the current launched function reads at ``layer`` with what was once written.

        Args:
            k_pages, v_pages: ``(c, page_size, heads, head_dim)``, device: contents of ``c`` full pages.
            tenancies: ``(c,) int64``, host array or device tensor: marked in ``bad`` where contents differ.
            sources: ``(c,) int64``: tenancies that produced the contents.
            counted: Whether to add them to ``checks``; what is replayed is counted by whoever replays it.
        """
        count = len(k_pages)
        if not count:
            return
        found = self._page_digests(k_pages, v_pages)
        expected = self.digests[:, layer].index_select(0, self._on_device(sources))
        self.bad.index_add_(0, self._on_device(tenancies), (found != expected).to(torch.int32))
        self.checks += count if counted else 0

    def set_pages(
        self, layer: int, k_pages: torch.Tensor, v_pages: torch.Tensor, tenancies: Int64Array | torch.Tensor
    ) -> None:
        """Note whole pages that the current launched function writes at ``layer``, in place of what they held.

        Args:
            k_pages, v_pages: As of ``check_pages``.
            tenancies: ``(c,) int64``, host array or device tensor, each named once.
        """
        self.digests[:, layer].index_copy_(0, self._on_device(tenancies), self._page_digests(k_pages, v_pages))

    def corrupted(self) -> Int64Array:
        """``(b,) int64`` ids of tenancies read with other contents than were written. Synchronize first."""
        found: Int64Array = self.bad.cpu().nonzero().flatten().numpy()
        return found

    def _page_digests(self, k_pages: torch.Tensor, v_pages: torch.Tensor) -> torch.Tensor:
        """``(c, page_size, heads, head_dim)`` each to ``(c,) int64``."""
        count, page_size = k_pages.shape[:2]
        if page_size > MAX_PAGE_SIZE:
            raise ControllerError(f"ledger: pages of {page_size} tokens; at most {MAX_PAGE_SIZE} are supported")
        tokens = self._token_digests(k_pages.flatten(0, 1), 0)
        tokens.add_(self._token_digests(v_pages.flatten(0, 1), 1))
        return tokens.view(count, page_size).mul_(self._slot_weights[:page_size]).sum(1)

    def _token_digests(self, tensor: torch.Tensor, part: int) -> torch.Tensor:
        """``(t, heads, head_dim)`` to ``(t,) int64``; ``part`` is 0 for K, 1 for V."""
        words = tensor.flatten(1).contiguous().view(_WORDS[tensor.dtype.itemsize])
        width = words.shape[1]
        if width > MAX_TOKEN_WORDS:
            raise ControllerError(f"ledger: {width} words per token; at most {MAX_TOKEN_WORDS} are supported")
        return words.to(torch.int64).mul_(self._word_weights[part, :width]).sum(1)

    def _on_device(self, ids: Int64Array | torch.Tensor) -> torch.Tensor:
        if isinstance(ids, torch.Tensor):
            return ids
        tensor = torch.from_numpy(np.require(ids, requirements=["C", "W"]))
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)  # pageable memory would block the host


def _odd(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, dtype=torch.int64, generator=generator) | 1
