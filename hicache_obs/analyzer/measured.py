"""Groups of operations by the device times that were measured. Fed by the analyzer; not thread-safe."""

from __future__ import annotations

from collections.abc import Iterator

from hicache_obs.analyzer.order import Actor
from hicache_obs.analyzer.shadow import Group, Operation


class Measured:
    """Groups whose device times are known, to find those that ran on after a moment.

    An actor's operations end one after the other, so the last few of its groups tell; ``Group.before_ns`` says how
    far back to look if they do not.
    """

    def __init__(self) -> None:
        self._groups: dict[Actor, list[Group]] = {}
        self._oldest = 0

    def note(self, operation: Operation, start_ns: int, end_ns: int, error_ns: int) -> None:
        """The device times of an operation are known."""
        operation.start_ns, operation.end_ns, operation.error_ns = start_ns, end_ns, error_ns
        group = operation.group
        if group.number < self._oldest:
            return
        groups = self._groups.get(group.actor)
        if groups is None:
            groups = self._groups[group.actor] = []
        if not group.end_ns and group.members:
            if groups:
                group.before_ns = max(groups[-1].before_ns, groups[-1].end_ns)
            groups.append(group)
        if end_ns <= group.end_ns:
            return
        group.end_ns = end_ns
        for other in reversed(groups):
            if other is group:
                break
            other.before_ns = max(other.before_ns, end_ns)

    def after(self, moment_ns: int, actor: Actor) -> Iterator[Group]:
        """Groups of others than ``actor`` of which some member ended after ``moment_ns``."""
        for other, groups in self._groups.items():
            if other == actor:
                continue
            for group in reversed(groups):
                if group.end_ns > moment_ns:
                    yield group
                if group.before_ns <= moment_ns:
                    break

    def forget(self, oldest: int) -> None:
        """Drop the groups numbered below ``oldest``, and take no more times of theirs."""
        self._oldest = oldest
        for groups in self._groups.values():
            kept = (place for place, group in enumerate(groups) if group.number >= oldest)
            del groups[: next(kept, len(groups))]
