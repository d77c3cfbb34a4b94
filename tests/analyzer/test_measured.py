"""Groups by measured times against a model that looks at every one of them."""

from __future__ import annotations

import random

import pytest

from hicache_obs.analyzer.measured import Measured
from hicache_obs.analyzer.shadow import Group, Label, Operation
from hicache_obs.records import ALL_LAYERS, OpId, StreamId, ThreadId

LABEL = Label("copy", 0, StreamId(0), 0, ThreadId(0))
ACTORS = 3


def _group(number: int, actor: int, members: int) -> Group:
    group = Group(number, actor, LABEL, (), [], [], {}, {})
    for _ in range(members):
        group.members.append(Operation(OpId(number), 1, number, ALL_LAYERS, 0, LABEL, group))
    return group


def _after(measured: Measured, moment_ns: int, actor: int) -> list[int]:
    return sorted(group.number for group in measured.after(moment_ns, actor))


@pytest.mark.parametrize("seed", range(60))
def test_agrees_with_a_model(seed: int) -> None:
    """Times come in any order and go back; the oldest groups are forgotten now and then."""
    rng = random.Random(seed)
    measured, ends, oldest = Measured(), dict[int, tuple[int, int]](), 0
    groups = [_group(number, rng.randrange(ACTORS), rng.randint(1, 3)) for number in range(1, 13)]
    todo = [operation for group in groups for operation in group.members]
    if seed % 3:
        rng.shuffle(todo)
    if seed % 3 == 1:
        todo.sort(key=lambda operation: operation.group.number + rng.choice((0, 0, 0, 2)))
    for operation in todo:
        group = operation.group
        start = rng.randrange(100) + (10 * group.number if seed % 3 < 2 else 0)
        end = start + rng.randint(1, 40)
        measured.note(operation, start, end, 3)
        assert (operation.start_ns, operation.end_ns, operation.error_ns) == (start, end, 3)
        if group.number >= oldest:
            ends[group.number] = group.actor, max(end, ends.get(group.number, (0, 0))[1])
        if rng.random() < 0.15:
            oldest = max(oldest, rng.randint(1, 9))
            measured.forget(oldest)
            ends = {number: entry for number, entry in ends.items() if number >= oldest}
        for moment in (start, end - 1, end, end + 1, rng.randrange(200)):
            for actor in range(ACTORS):
                late = [number for number, (on, over) in sorted(ends.items()) if on != actor and over > moment]
                found = _after(measured, moment, actor)
                assert [number for number in found if number >= oldest] == late, (moment, actor)
                if seed % 3 == 0:
                    assert found == late  # groups got their times in their order


def test_only_as_many_groups_are_looked_at_as_may_matter() -> None:
    """Behind one before which all had ended by then there is nothing to find."""
    measured = Measured()
    seen: list[int] = []

    class Watched(Group):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> object:
            if name == "before_ns":
                seen.append(object.__getattribute__(self, "number"))
            return object.__getattribute__(self, name)

    for number in range(1, 6):
        group = Watched(number, 0, LABEL, (), [], [], {}, {})
        group.members.append(Operation(OpId(number), 1, number, ALL_LAYERS, 0, LABEL, group))
        measured.note(group.members[0], 10 * number - 10, 10 * number, 0)
    seen.clear()
    assert _after(measured, 35, 1) == [4, 5]
    assert seen == [5, 4]
    seen.clear()
    assert _after(measured, 40, 1) == [5]
    assert seen == [5]
