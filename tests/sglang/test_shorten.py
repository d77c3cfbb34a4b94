"""Hooks that replace the engine's wrapper: where they may, where they may not, and that they record the same."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from hicache_obs.records import DropReason, EventRecord, EventWait, Kernel, Purpose, WaitStream
from hicache_obs.sglang.shorten import shorten, shorten_one
from hicache_obs.sglang.streams import stream_adapters

ROWS = {row.target: row for row in stream_adapters("a.Stream", "a.Event")}


def classes(it, calls, delegating):
    """Stream and event classes like torch.cuda's, whose stream asks the event to wait, or like torch.cpu's."""

    class Event:
        def record(self, stream=None):
            calls.append(("record", stream))

        def wait(self, stream=None):
            calls.append(("wait", stream))

    class Stream:
        def __init__(self, handle):
            self.cuda_stream = handle

        def wait_event(self, event):
            calls.append(("wait", self))

        def wait_stream(self, stream):
            calls.append(("wait_stream", stream))
            self.wait_event(Event())

    if delegating:

        def wait_event(self, event):
            event.wait(self)

        Stream.wait_event = wait_event
    hooks = {
        (cls, name): it.hook(cls, name, ROWS[f"a.{cls.__name__}.{name}"])
        for cls, names in ((Event, ("record", "wait")), (Stream, ("wait_event", "wait_stream")))
        for name in names
    }
    return Event, Stream, hooks


def drive(it, calls, delegating, short):
    """One round with layer waits and the calls around it; what was recorded and what was called."""
    Event, Stream, hooks = classes(it, calls, delegating)
    if short:
        for (cls, name), hook in hooks.items():
            wrapper = vars(cls)[name]
            assert shorten_one(it.session, ROWS[f"a.{cls.__name__}.{name}"], hook, cls, name)
            assert vars(cls)[name] is not wrapper
    it.session.timed, it.session._timing = False, None
    schedule, forward = Stream(3), Stream(4)
    it.current = schedule
    done, layers = Event(), [Event() for _ in range(3)]
    for layer, event in enumerate(layers):
        it.session.event(event).layer = layer
    for _ in range(2):
        forward.wait_stream(schedule)

        def model(runner, batch):
            for event in layers:
                Stream(4).wait_event(event)  # another object at each call, as torch's current stream is
            done.record()

        it.current = forward
        it.call("ModelRunner.forward", it.runner, it.batch, original=model)
        done.record(schedule)
        it.current = schedule
        schedule.wait_event(done)
        done.wait()
        done.wait(forward)
        it.session.local.purpose = Purpose.LOAD_FENCE
        done.wait(forward)
        forward.wait_stream(schedule)
        it.session.local.purpose = None
    found = []
    for one in it.records(Kernel, EventRecord, EventWait, WaitStream):
        fields = {name: getattr(one, name, None) for name in ("event", "stream", "waiter", "on", "purpose", "layers")}
        found.append((type(one), *fields.values()))
    plain = [name for name, _ in calls]
    return found, plain


@pytest.mark.parametrize("delegating", [False, True])
def test_the_short_way_records_what_the_long_way_records(server, delegating):
    long = drive(server(), [], delegating, short=False)
    short = drive(server(), [], delegating, short=True)
    assert short == long
    assert len(short[0]) == 2 * 14


def test_new_events_are_recorded_by_the_short_way_where_they_take_an_attribute(server):
    class Plain:
        def record(self, stream=None): ...

    class Slotted:
        __slots__ = ()

        def record(self, stream=None): ...

    for cls, the_long_way in ((Plain, 0), (Slotted, 3)):
        it, asked = server(), []
        row, event_of = ROWS["a.Event.record"], it.session.event
        hook = it.hook(cls, "record", row)
        it.session.event = lambda event, asked=asked, event_of=event_of: asked.append(event) or event_of(event)
        assert shorten_one(it.session, row, hook, cls, "record")
        events = [cls() for _ in range(3)]
        for event in events:
            event.record()
        assert len(asked) == the_long_way
        assert it.session.counters.errors == {}
        assert len({one.event for one in it.records(EventRecord)}) == 3
        assert [event_of(event).stamp for event in events] == [2, 2, 2]


def test_a_new_event_inside_a_gated_call_is_expected_by_its_gate(server):
    it, expected = server(), []
    Event, _, hooks = classes(it, [], delegating=False)
    assert shorten_one(it.session, ROWS["a.Event.record"], hooks[Event, "record"], Event, "record")
    it.session.local.gated = SimpleNamespace(expect=expected.append)
    event = Event()
    event.record()
    it.session.local.gated = None
    Event().record()
    assert expected == [it.session.event(event).event_id]


def test_an_engines_error_goes_through_and_nothing_stays_behind(server):
    it, calls = server(), []
    Event, _, _ = classes(it, calls, delegating=False)

    class Failing(Event):
        def record(self, stream=None):
            raise RuntimeError("theirs")

    row = ROWS["a.Event.record"]
    hook = it.hook(Failing, "record", row)
    assert shorten_one(it.session, row, hook, Failing, "record")
    event = Failing()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="theirs"):
            event.record()
    assert it.session.event(event).stamp % 2 == 0
    assert not it.session.local.in_stream_call
    assert it.session.counters.errors == {}


def test_a_function_that_is_not_plain_or_not_ours_alone_keeps_its_wrapper(server):
    it = server()
    row = ROWS["a.Event.record"]

    class Named:
        def record(self, stream=None, *, external=False): ...

    class Anything:
        def record(self, *args): ...

    class Shared:
        def record(self, stream=None): ...

    class Twice:
        def record(self, stream=None): ...

    @functools.wraps(Twice.record)
    def theirs(self, stream=None, original=Twice.record):
        return original(self, stream)

    Twice.record = theirs
    hooks = {cls: it.hook(cls, "record", row) for cls in (Named, Anything, Shared, Twice)}
    ours = Shared.record
    Shared.record = functools.wraps(ours)(lambda *args: ours(*args))
    for cls, hook in hooks.items():
        before = vars(cls)["record"]
        assert not shorten_one(it.session, row, hook, cls, "record")
        assert vars(cls)["record"] is before
    assert shorten(it.session, [(row, hooks[Named])]) == []  # there is no module a


def test_few_slots_in_host_memory_are_recorded_as_many_are(server):
    """The same round as plain numbers and as arrays, which is the way of long batches."""
    kernels = []
    for few in (True, False):
        it = server()
        it.session.timed, it.session._timing = False, None
        if not few:
            it.batch.seq_lens_cpu = SimpleNamespace(numpy=it.batch.seq_lens_cpu.numpy)  # no tolist
        it.call("ModelRunner.forward", it.runner, it.batch)
        it.call("ModelRunner.forward", it.runner, it.batch)
        kernels.append(
            [
                (one.layers, [(a.space, a.mode, a.pool, a.ids.tolist()) for a in one.accesses])
                for one in it.records(Kernel)
            ]
        )
    assert kernels[0] == kernels[1]
    assert len(kernels[0]) == 2


def test_a_round_that_finds_no_room_is_counted_and_the_next_is_whole(server):
    it = server()
    it.session.timed, it.session._timing = False, None
    few, it.batch.out_cache_loc = it.batch.out_cache_loc, torch.arange(4, 2004)  # the ring holds 1024 numbers
    it.call("ModelRunner.forward", it.runner, it.batch)
    assert it.session.ring.dropped == {DropReason.ARENA_FULL: 1}
    it.batch.out_cache_loc = few
    it.call("ModelRunner.forward", it.runner, it.batch)
    (kernel,) = it.records(Kernel)
    assert [access.ids.tolist() for access in kernel.accesses] == [[1], [1, 2]]
