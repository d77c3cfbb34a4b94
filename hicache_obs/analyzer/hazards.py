"""Names of conflicts: what role each operation plays, and which hazard two roles in one place make.

A hazard of two roles on device pages is a row of ``_DEVICE_HAZARDS``; the rest are lines of ``Hazards.of``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hicache_obs.analyzer.shadow import Operation, Overlap, Shadow
from hicache_obs.findings import Hazard
from hicache_obs.records import Access, Direction, IoKind, Kernel, Memcpy, Mode, Space

IO_ROLE: Final = {
    IoKind.STORAGE_READ: "storage",
    IoKind.STORAGE_WRITE: "storage",
    IoKind.DEVICE_READ: "device read",
    IoKind.RDMA_WRITE: "rdma",
}
TRANSFERS: Final = ("restore", "backup", "storage", "device read", "rdma")
"""Operations whose pages their owner must not give away before it knows them to be over."""
_PAGE_ROLE: Final = {"copy": "forward", "device read": "backup"}
"""What an operation counts as when it touches device pages."""
_DEVICE_HAZARDS: Final = {
    ("forward", Mode.WRITE, "restore", Mode.WRITE): Hazard.WAW_FORWARD_RESTORE,
    ("restore", Mode.WRITE, "forward", Mode.WRITE): Hazard.WAW_FORWARD_RESTORE,
    ("forward", Mode.READ, "restore", Mode.WRITE): Hazard.WAR_FORWARD_RESTORE,
    ("restore", Mode.WRITE, "forward", Mode.READ): Hazard.RAW_RESTORE_FORWARD,
    ("forward", Mode.WRITE, "backup", Mode.READ): Hazard.RAW_FORWARD_BACKUP,
    ("backup", Mode.READ, "forward", Mode.WRITE): Hazard.WAR_BACKUP_FORWARD,
}

_COPYING: Final = {
    "restore": {(Space.HOST, Mode.READ), (Space.DEVICE, Mode.WRITE)},
    "backup": {(Space.DEVICE, Mode.READ), (Space.HOST, Mode.WRITE)},
}
"""What a kernel does to pages if it is a copy, and nothing else."""
_OWN_HAZARD: Final = {"graph": Hazard.GRAPH, "relocate": Hazard.RELOCATION}
"""Operations whose every conflict has one name."""


def role(record: Kernel | Memcpy) -> str:
    """Role of an operation on a stream, as in ``Label.what``."""
    if isinstance(record, Kernel):
        for access in record.accesses:
            if access.space is Space.DEVICE:
                return "forward"
        return "kernel"
    if record.direction is Direction.HOST_TO_DEVICE:
        return "restore"
    return "backup" if record.direction is Direction.DEVICE_TO_HOST else "copy"


def copying(accesses: Iterable[Access]) -> str | None:
    """The transfer that a kernel with these accesses makes, ``None`` if it does more or less than copy pages between
    host and device."""
    touched = {(access.space, access.mode) for access in accesses if access.space is not Space.BUFFER}
    return next((transfer for transfer, ends in _COPYING.items() if touched == ends), None)


def part(operation: Operation) -> str:
    """``Label.what``, but a kernel that only copies is the transfer that it makes."""
    what = operation.label.what
    return (copying(operation.group.accesses) or what) if what == "forward" else what


def principal(overlaps: tuple[Overlap, ...]) -> Overlap:
    """The overlap that names a conflict."""
    return max(overlaps, key=_severity)


class Hazards:
    """Names the hazard of a conflict; asks the shadow what was freed or moved since."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow

    def of(self, overlaps: tuple[Overlap, ...], earlier: Operation, later: Operation) -> Hazard:
        """Name of the conflict, by what the two operations are and what they share."""
        main = principal(overlaps)
        kinds = (part(earlier), part(later))
        if self.moved(overlaps, earlier, later):
            return Hazard.RELOCATION
        if "graph" in kinds:
            return Hazard.GRAPH
        if "rdma" in kinds:
            return Hazard.RDMA
        if main.space is Space.HOST:
            return Hazard.STORAGE_PREFETCH if "storage" in kinds else Hazard.HOST_REUSE
        if main.space is Space.BUFFER:
            if self._shadow.freed_since(main, earlier.seq):
                return Hazard.LIFETIME
            pinned = "host" in kinds and ("restore" in kinds or "backup" in kinds)
            return Hazard.HOST_REUSE if pinned else Hazard.METADATA_WAR
        first, second = (_PAGE_ROLE.get(kind, kind) for kind in kinds)
        otherwise = Hazard.STORAGE_PREFETCH if "storage" in kinds else Hazard.OTHER
        return _DEVICE_HAZARDS.get((first, main.earlier, second, main.later), otherwise)

    def between(self, earlier: Operation, later: Operation) -> Hazard | None:
        """Hazard a fence between the two prevents, ``None`` if they share no device page."""
        shared = self._shadow.shared(later.group, earlier.group)
        overlaps = tuple(overlap for overlap in shared if overlap.space is Space.DEVICE)
        return self.of(overlaps, earlier, later) if overlaps else None

    def moved(self, overlaps: tuple[Overlap, ...], earlier: Operation, later: Operation) -> bool:
        """Whether a relocation is one of the two, or moved a shared page away in between."""
        kinds = (earlier.label.what, later.label.what)
        return "relocate" in kinds or any(self._shadow.moved_since(o, earlier.seq) for o in overlaps)

    def stale(self, overlaps: tuple[Overlap, ...], earlier: Operation, later: Operation) -> bool:
        """Whether a shared page was moved away: an address that one of the two no longer may use. Not so where a
        relocation puts a page."""
        if any(self._shadow.moved_since(overlap, earlier.seq) for overlap in overlaps):
            return True
        first, second = (operation.label.what == "relocate" for operation in (earlier, later))
        return any(
            (first and overlap.earlier is Mode.READ) or (second and overlap.later is Mode.READ) for overlap in overlaps
        )


def _severity(overlap: Overlap) -> tuple[bool, bool, bool]:
    """Both write, then read-after-write, then write-after-read; device pages before the rest."""
    both = overlap.earlier is Mode.WRITE and overlap.later is Mode.WRITE
    return overlap.space is Space.DEVICE, both, overlap.earlier is Mode.WRITE


def _checked_hazards(what: str, space: Space, mode: Mode) -> tuple[Hazard, ...]:
    if what in _OWN_HAZARD:
        return (_OWN_HAZARD[what],)
    if space is Space.HOST:
        return (Hazard.HOST_REUSE,)
    if space is Space.BUFFER:
        return (Hazard.METADATA_WAR,)
    mine = (_PAGE_ROLE.get(what, what), mode)
    found = {h for (_, _, later, later_mode), h in _DEVICE_HAZARDS.items() if (later, later_mode) == mine}
    return tuple(sorted(found))


CHECKED: Final = {
    what: tuple((4 * space + 2 * mode, _checked_hazards(what, space, mode)) for space in Space for mode in Mode)
    for what in ("forward", "restore", "backup", "copy", "kernel", "host", "graph", "relocate", *IO_ROLE.values())
}
"""By role: the hazards for which a look-up of such an access counts as a check, by place in ``Shadow``'s sums."""
