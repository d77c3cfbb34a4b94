"""Every exception this package raises for a caller's mistake or a failed run.

::

    HicacheObsError
    ├── InputError (ValueError)        bad file, flag, environment or trace        exit code 2
    │   ├── ConfigError                a setting or option
    │   │   └── AgentRunning           another agent reads the rings of this directory
    │   ├── TraceError                 a ring, journal or scenario file
    │   │   ├── LayoutError            a ring of another version
    │   │   └── RingTaken              a ring that another agent reads
    │   └── WorkloadError              a workload file
    ├── StreamError (RuntimeError)     a stream or event used as the protocol forbids
    │   └── DeadlockError              nothing queued on the device can run
    └── ControllerError (RuntimeError) the cache controller refuses an operation
        ├── OutOfPages                 a pool has fewer free pages than asked for
        ├── PagePinned                 a load-back claims pages of an in-flight load-back
        ├── StaleGeneration            a layer event was overwritten before it was waited for
        ├── GateTimeout                the demo's writer gate did not open in time
        └── RankError                  a rank of a group has ended, is late, or decides something else
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class HicacheObsError(Exception):
    """Base of all errors raised on purpose by hicache-obs."""


class InputError(HicacheObsError, ValueError):
    """What the user handed in cannot be used; the message names the input, the value and what is allowed."""


class ConfigError(InputError):
    """A setting, flag or environment variable has a value that is not allowed."""


class AgentRunning(ConfigError):
    """Another agent reads the rings of this directory; a directory has one."""


class TraceError(InputError):
    """A ring, journal or scenario file cannot be read; the message names the file and the place in it."""


class LayoutError(TraceError):
    """A ring was written by another version, in a layout that this one does not read."""


class RingTaken(TraceError):
    """Another agent reads this ring; a ring has one reader."""


class WorkloadError(InputError):
    """A workload file cannot be read; the message names the file and the line."""


class StreamError(HicacheObsError, RuntimeError):
    """A stream or event was used in a way the stream protocol forbids."""


class DeadlockError(StreamError):
    """The host waits for device work that can never run."""


class ControllerError(HicacheObsError, RuntimeError):
    """The cache controller refuses an operation; its state is unchanged."""


class OutOfPages(ControllerError):
    """A pool has fewer free pages than were asked for."""


class PagePinned(ControllerError):
    """A load-back claims nodes that an in-flight load-back has pinned."""


class StaleGeneration(ControllerError):
    """A consumer waits for a layer event that a newer load-back has already overwritten."""


class GateTimeout(ControllerError):
    """The gate that holds the last writer did not open in time, so the run proves nothing."""


class RankError(ControllerError):
    """A rank of a group has ended, does not come in time, or decides something else; the message names it."""


@contextmanager
def naming(source: object) -> Iterator[None]:
    """Put the name of a trace in front of what the analyzer refuses in it, which knows no names."""
    try:
        yield
    except TraceError as error:
        raise TraceError(f"{source}: {error}") from error
