"""NVTX ranges of domain ``hicache``: four fixed messages, and the operation id as payload.

A tool keeps every message it has seen, so the messages are few and registered once; what differs between ranges
is the scalar payload, which is the operation id of the record (``hicache_obs.records``).

Which API is used depends on the installed ``nvtx`` and on the tool, and is decided once, at setup:

* nvtx 0.2.12 and newer: the domain's own API with prebuilt attributes (0.1 µs a pair). Without a tool the domain
  is a dummy, and nothing is called at all.
* nvtx 0.2.10 and 0.2.11: the module's API. It cannot say whether a tool is there, so the variable a tool is loaded
  through decides.
* nvtx 0.2.12 and newer under an Nsight Systems that does not know its payload extension (2022.4, for one): the
  package itself switches its ranges off and none are recorded. Install nvtx 0.2.11 there.
"""

from __future__ import annotations

import enum
import importlib.metadata
import os
import threading
from typing import Any, Final, Protocol

from hicache_obs.records import NVTX_DOMAIN

_INJECTION: Final = ("NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH")


class RangeName(enum.IntEnum):
    """The ranges; ``message`` is what the tool shows."""

    SEGMENT = 0
    """A launched segment of a forward round."""
    WAIT_STREAM = 1
    WAIT_EVENT = 2
    COPY = 3

    @property
    def message(self) -> str:
        """The registered message."""
        return self.name.lower()


_MESSAGES: Final = tuple(name.message for name in RangeName)


class RangeStatus(enum.Enum):
    """What becomes of the ranges."""

    NO_TOOL = "no tool is attached: ranges cost nothing and go nowhere"
    DOMAIN = "recorded by the attached tool (domain API)"
    MODULE = "recorded by the attached tool (module API)"
    REFUSED = "not recorded: this nvtx needs a newer tool; install nvtx 0.2.11"
    NO_PACKAGE = "not recorded: the nvtx package cannot be imported"


class Ranges(Protocol):
    """Opens and closes ranges. Both calls are made in the thread that runs the item, properly nested."""

    @property
    def status(self) -> RangeStatus: ...

    def push(self, name: RangeName, op: int) -> None:
        """Open a range. Partner of ``pop``."""

    def pop(self) -> None:
        """Close the calling thread's innermost range. Partner of ``push``."""


class NoRanges:
    """What is used when nobody watches."""

    def __init__(self, status: RangeStatus = RangeStatus.NO_TOOL) -> None:
        self._status = status

    @property
    def status(self) -> RangeStatus:
        """As given."""
        return self._status

    def push(self, name: RangeName, op: int) -> None:
        """Nothing."""

    def pop(self) -> None:
        """Nothing."""


class _Attributes(threading.local):
    """Prebuilt attributes by ``RangeName``; each thread has its own, for it changes the payload in place."""

    def __init__(self, domain: Any) -> None:
        self.by_name = [domain.get_event_attributes(message=name.message, payload=0) for name in RangeName]


class DomainRanges:
    """Ranges through an nvtx domain object that a tool listens to."""

    status: Final = RangeStatus.DOMAIN

    def __init__(self, domain: Any) -> None:
        self._attributes = _Attributes(domain)
        self._push = domain.push_range
        self.pop = domain.pop_range
        """See ``Ranges.pop``."""

    def push(self, name: RangeName, op: int) -> None:
        """See ``Ranges.push``."""
        attributes = self._attributes.by_name[name]
        attributes.payload = op
        self._push(attributes)


class ModuleRanges:
    """Ranges through the functions of an nvtx package that has no domain ranges yet."""

    status: Final = RangeStatus.MODULE

    def __init__(self, nvtx: Any) -> None:
        self._nvtx = nvtx

    def push(self, name: RangeName, op: int) -> None:
        """See ``Ranges.push``."""
        self._nvtx.push_range(_MESSAGES[name], color="blue", domain=NVTX_DOMAIN, payload=op)

    def pop(self) -> None:
        """See ``Ranges.pop``."""
        self._nvtx.pop_range(domain=NVTX_DOMAIN)


def open_ranges() -> Ranges:
    """The cheapest way to make ranges in this process. Loads the tool's library, if there is one."""
    try:
        import nvtx
    except ImportError:
        return NoRanges(RangeStatus.NO_PACKAGE)
    expected = any(os.environ.get(variable) for variable in _INJECTION)
    get_domain = getattr(nvtx, "get_domain", None)
    domain: Any = get_domain(NVTX_DOMAIN) if get_domain is not None else None
    if not hasattr(domain, "push_range"):
        return ModuleRanges(nvtx) if expected else NoRanges()
    if domain.get_event_attributes(message=RangeName.SEGMENT.message) is None:  # what a dummy domain answers
        return NoRanges(RangeStatus.REFUSED if expected else RangeStatus.NO_TOOL)
    return DomainRanges(domain)


def describe() -> str:
    """One line for ``doctor``: the nvtx version, and what becomes of the ranges in this process."""
    status = open_ranges().status
    if status is RangeStatus.NO_PACKAGE:
        return f"nvtx: {status.value}"
    return f"nvtx {importlib.metadata.version('nvtx')}: {status.value}"
