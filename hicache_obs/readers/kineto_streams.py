"""``DeviceStreams``: which stream a row of a torch.profiler trace means, where the row says enough.

A stream's number is unique in its context only, and a process may have several: one for each device, and more where
a device is shared between green contexts. A row about synchronisation states its context; its device is 0 where the
profiler did not know that context, so the device is taken from the operations of the same context.
"""

from __future__ import annotations

from collections.abc import Iterable

from hicache_obs.readers.profile import NO_ID, UNKNOWN, Interner


class DeviceStreams:
    """Streams of one file, numbered in order of first sight.

    Args:
        places: Process, device and context of every operation, ``UNKNOWN`` where it does not say.

    Attributes:
        keys: Process, device, context and number of each stream; the number of one that is not known is ``UNKNOWN``.
        contradictions: Contexts of which operations name several devices.
    """

    def __init__(self, places: Iterable[tuple[int, int, int]]) -> None:
        self._number = Interner()
        self._contexts: dict[tuple[int, int], set[int]] = {}
        """By process and device."""
        self._devices: dict[tuple[int, int], set[int]] = {}
        """By process and context."""
        self._of_process: dict[int, set[int]] = {}
        for process, device, context in set(places):
            known = self._contexts.setdefault((process, device), set())
            self._of_process.setdefault(process, set()).add(device)
            if context != UNKNOWN:
                known.add(context)
                self._devices.setdefault((process, context), set()).add(device)
        self.contradictions = sum(len(devices) > 1 for devices in self._devices.values())

    @property
    def keys(self) -> list[tuple[int, int, int, int]]:
        """See the class."""
        return self._number.keys

    def may_work(self, process: int, context: int) -> bool:
        """Whether operations may be of ``context``, given what is known of them."""
        known = any(owner == process for owner, _ in self._devices)
        return context == UNKNOWN or not known or (process, context) in self._devices

    def of_operation(self, process: int, device: int, context: int, stream: int) -> int:
        """The stream an operation ran on."""
        several = len(self._contexts[process, device]) > 1
        if device == UNKNOWN or not 0 <= stream < NO_ID or (several and context == UNKNOWN):
            return self._number((process, device, 0, UNKNOWN))
        return self._number((process, device, context if several else 0, stream))

    def of_sync(self, process: int, device: int, context: int, stream: int) -> int:
        """The stream a row about synchronisation names, ``UNKNOWN`` if it cannot be told which one that is."""
        if not 0 <= stream < NO_ID:
            return UNKNOWN
        owners = self._devices.get((process, context), set())
        if len(owners) == 1:
            (device,) = owners
        elif owners or len(self._of_process.get(process, set())) > 1:
            return UNKNOWN
        known = self._contexts.get((process, device), set())
        if device == UNKNOWN or (len(known) > 1 and context not in known):
            return UNKNOWN
        return self._number((process, device, context if len(known) > 1 else 0, stream))
