"""The decision log: what ranks must decide alike, in one numbered sequence that all of them enter together.

Every rank runs its own scheduler on its own pages, and makes the same decisions from the same requests. What a rank
sees of time is its own, though: which transfers a query shows to be over, which replies of its storage threads have
come, how many pages those brought, what its clock says. Nothing of that may be decided on alone: one rank would free a
page, or admit a request, a step before its peers, and from then on their rounds differ. So each such number is entered
here first, and every rank goes on with the smallest: what all of them have.

The first rank collects an entry from every peer, and sends the outcome. That makes it the one that can say who is
missing: a rank that has ended, does not come in time, or comes with another entry ends the run of all of them, with one
message that names it.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Final, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_obs.errors import RankError

Agree: TypeAlias = Callable[[str, Sequence[int]], Sequence[int]]
"""``agree(what, values)``: the values to decide on, as many as were given."""
TIMEOUT_S: Final = 60.0
"""How long a rank waits for its peers, by default: a rank under a profiler may take seconds for a step."""
START_S: Final = 60.0
"""The first entry may take longer than that: processes start, and import what they need."""
KEPT: Final = 64
"""Newest entries that a log keeps; the digest covers all."""
_GRACE: Final = 1.5
"""Peers wait longer than the first rank, which can name the one that is missing."""
_Values: TypeAlias = npt.NDArray[np.int64]
_Choose: TypeAlias = Callable[[Sequence[_Values]], _Values]
_HEADER: Final = struct.Struct("<qBB")
_ENTER, _DECIDED, _FAILED = range(3)


def alone(_what: str, values: Sequence[int]) -> Sequence[int]:
    """``Agree`` of an engine that has no peers: its own values."""
    return values


@dataclass(frozen=True, slots=True)
class Decision:
    """One entry.

    Attributes:
        number: From 1.
        what: Its kind, the same on every rank.
        values: What was decided.
    """

    number: int
    what: str
    values: tuple[int, ...]


class DecisionLog:
    """One rank's end of the log. One thread, the scheduler's; every call blocks until all ranks have made it.

    Args:
        names: Of all ranks, for messages; the first one collects.
        rank: Place of this one in ``names``.
        links: Of the first rank: a connection to every other. Of another: one, to the first.
        timeout_s: How long to wait for a peer; for the first entry at least ``START_S``.

    Attributes:
        on_enter: Told the kind of each entry before this rank waits for its peers.
        waited_ns: Time spent in calls.
    """

    def __init__(
        self, names: Sequence[str], rank: int, links: Mapping[int, Connection], *, timeout_s: float = TIMEOUT_S
    ) -> None:
        expected = set(range(1, len(names))) if rank == 0 else {0}
        assert set(links) == expected, f"rank {rank} of {len(names)} has links to {sorted(links)}"
        self.on_enter: Callable[[str], None] | None = None
        self.waited_ns = 0
        self._names = tuple(names)
        self._rank = rank
        self._links = dict(links)
        self._timeout_s = timeout_s
        self._number = 0
        self._newest: deque[Decision] = deque(maxlen=KEPT)
        self._hash = hashlib.blake2b(digest_size=16)

    @property
    def entries(self) -> int:
        """Entries so far."""
        return self._number

    @property
    def digest(self) -> str:
        """Of all entries: ranks with the same digest have decided the same."""
        return self._hash.hexdigest()

    @property
    def newest(self) -> tuple[Decision, ...]:
        """The last ``KEPT`` entries, oldest first."""
        return tuple(self._newest)

    def agree(self, what: str, values: Sequence[int]) -> list[int]:
        """The smallest of what the ranks give, place by place; ``values`` are 64-bit, as many on every rank.

        Raises:
            RankError: A rank has ended, is late, or enters something else. The log is of no further use.
        """
        return self._enter(what, np.array(values, np.int64), _smallest)

    def publish(self, what: str, values: Sequence[int] | None = None) -> list[int]:
        """What the first rank gives; the others give nothing.

        Raises:
            RankError: As ``agree``.
        """
        assert (values is not None) == (self._rank == 0), "the first rank publishes, and only that one"
        return self._enter(what, np.array([] if values is None else values, np.int64), _first)

    def close(self) -> None:
        """Close the links: peers that still wait for this rank learn that it has ended. Idempotent."""
        for link in self._links.values():
            link.close()

    @property
    def _patience_s(self) -> float:
        return max(self._timeout_s, START_S) if self._number == 1 else self._timeout_s

    # -- inside --------------------------------------------------------------------------------------------------

    def _enter(self, what: str, mine: _Values, choose: _Choose) -> list[int]:
        started = time.perf_counter_ns()
        self._number += 1
        if self.on_enter is not None:
            self.on_enter(what)
        if self._rank == 0:
            decided = self._collect(what, mine, choose)
        else:
            decided = self._follow(what, mine)
        values: list[int] = decided.tolist()
        self._newest.append(Decision(self._number, what, tuple(values)))
        self._hash.update(_packed(_DECIDED, self._number, what, decided))
        self.waited_ns += time.perf_counter_ns() - started
        return values

    def _collect(self, what: str, mine: _Values, choose: _Choose) -> _Values:
        """The first rank's part: wait for every peer, then tell all of them."""
        entered: list[_Values] = [mine]
        missing = dict(self._links)
        deadline = time.monotonic() + self._patience_s
        while missing:
            ready = wait(list(missing.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = " and ".join(self._names[rank] for rank in missing)
                self._fail(f"{late}: not at {self._place(what)} within {self._patience_s:g} s")
            for rank in [rank for rank, link in missing.items() if link in ready]:
                entered.append(self._take(rank, what))
                del missing[rank]
        try:
            decided = choose(entered)
        except ValueError:
            sizes = ", ".join(str(len(values)) for values in entered)
            self._fail(f"ranks differ at {self._place(what)}: they enter {sizes} values")
        self._tell(_packed(_DECIDED, self._number, what, decided))
        return decided

    def _take(self, rank: int, what: str) -> _Values:
        try:
            _, number, theirs, payload = _unpacked(self._links[rank].recv_bytes())
        except (EOFError, OSError):
            self._fail(f"{self._names[rank]} has ended before {self._place(what)}")
        if (number, theirs) != (self._number, what):
            self._fail(f"ranks differ: {self._names[rank]} is at decision {number} ({theirs}), not {self._place(what)}")
        return np.frombuffer(payload, np.int64)

    def _follow(self, what: str, mine: _Values) -> _Values:
        """Another rank's part."""
        link = self._links[0]
        try:
            link.send_bytes(_packed(_ENTER, self._number, what, mine))
            if not link.poll(self._patience_s * _GRACE):
                raise RankError(f"{self._names[0]}: no outcome of {self._place(what)} within {self._patience_s:g} s")
            kind, _, _, payload = _unpacked(link.recv_bytes())
        except (EOFError, OSError):
            raise RankError(self._last_word() or f"{self._names[0]} has ended before {self._place(what)}") from None
        if kind == _FAILED:
            raise RankError(payload.decode())
        return np.frombuffer(payload, np.int64)

    def _last_word(self) -> str:
        """Why the first rank has ended, if it said so before this one could enter."""
        try:
            kind, _, _, payload = _unpacked(self._links[0].recv_bytes())
        except (EOFError, OSError):
            return ""
        return payload.decode() if kind == _FAILED else ""

    def _fail(self, message: str) -> NoReturn:
        """End the run of all ranks."""
        self._tell(_HEADER.pack(self._number, _FAILED, 0) + message.encode())
        raise RankError(message)

    def _tell(self, message: bytes) -> None:
        for link in self._links.values():
            try:
                link.send_bytes(message)
            except OSError:
                continue  # it has ended: the next entry says so

    def _place(self, what: str) -> str:
        return f"decision {self._number} ({what})"


def _smallest(entered: Sequence[_Values]) -> _Values:
    smallest: _Values = np.stack(entered).min(axis=0)
    return smallest


def _first(entered: Sequence[_Values]) -> _Values:
    return entered[0]


def _packed(kind: int, number: int, what: str, values: _Values) -> bytes:
    name = what.encode()
    return _HEADER.pack(number, kind, len(name)) + name + values.tobytes()


def _unpacked(message: bytes) -> tuple[int, int, str, bytes]:
    """Kind, number, what and payload of a message."""
    number, kind, length = _HEADER.unpack_from(message)
    end = _HEADER.size + length
    return kind, number, message[_HEADER.size : end].decode(), message[end:]
