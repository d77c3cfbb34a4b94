"""Hand-overs with tables of a few entries: exactly what is forgotten, when, and what a receiver then knows of whom."""

from __future__ import annotations

import pytest

from hicache_obs.analyzer import Analyzer, handover
from hicache_obs.analyzer.handover import Blocks, Channels
from hicache_obs.analyzer.order import Order
from hicache_obs.findings import Proof
from hicache_obs.records import (
    ALL_LAYERS,
    NO_OP,
    DropReason,
    Kernel,
    Lost,
    Memcpy,
    OpId,
    RecordStream,
    StreamId,
    TensorAlloc,
    TensorFree,
    ThreadId,
    ThreadPost,
    ThreadRecv,
)
from hicache_obs.testing import History, RecordingSink

READER = ThreadId(99)


class Machine:
    """Threads that post on channels; the thread that posts on channel 7 is called 7 as well."""

    def __init__(self) -> None:
        self.order = Order()
        self.channels = Channels(self.order)
        self.seq = 0

    def post(self, *channels: int, by: int | None = None) -> Machine:
        for channel in channels:
            thread = ThreadId(channel if by is None else by)
            self.order.advance(self.order.thread(thread))
            self.channels.post(ThreadPost(OpId(0), thread, 0, channel), self.seq)
            self.seq += 1
        return self

    def take(self, *channels: int, thread: ThreadId = READER) -> Machine:
        for channel in channels:
            self.channels.receive(ThreadRecv(OpId(0), thread, 0, channel))
        return self

    def lose(self) -> Machine:
        self.order.lose(self.seq)
        self.channels.lose()
        return self

    def known(self, *threads: int, by: ThreadId = READER) -> str:
        """What ``by`` knows of the newest step of each: sure, perhaps, or nothing."""
        reader = self.order.thread(by)
        words = {Proof.ORDERED: "s", Proof.UNKNOWN: "p", Proof.NONE: "-"}
        actors = [self.order.thread(ThreadId(thread)) for thread in threads]
        return "".join(words[self.order.proof(reader, a, self.order.clock(a)[a])] for a in actors)

    def taken(self, *channels: int) -> str:
        """What a reader of its own learns from each channel of the thread that has its number."""
        found = ""
        for channel in channels:
            reader = ThreadId(1000 + channel)
            found += self.take(channel, thread=reader).known(channel, by=reader)
        return found


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four posts are kept."""
    monkeypatch.setattr(handover, "MAX_POSTS", 4)


@pytest.mark.usefixtures("four")
def test_the_older_half_is_forgotten_with_the_first_that_does_not_fit() -> None:
    """And with it every channel whose number lies among theirs."""
    assert Machine().post(10, 11, 12, 13).taken(10, 11, 12, 13) == "ssss"
    assert Machine().post(10, 11, 12, 13, 14).taken(10, 11, 12, 13, 14) == "pppss"
    assert Machine().post(12, 11, 10, 14, 13).taken(10, 11, 12, 13, 14) == "pppss"
    assert Machine().post(10, 12, 14, 11, 15).taken(10, 11, 12, 14, 15) == "pppps"
    assert Machine().post(10, 12, 14, 11, 15).take(11).known(10, 11, 12, 14, 15) == "pppp-"
    assert Machine().post(10, 12, 14, 9, 15).take(9).known(9, 10) == "s-"
    assert Machine().post(10, 12, 14, 9, 15).take(13).known(9, 10, 12, 14) == "-ppp"  # nobody posted there
    assert Machine().post(10, 11, 12, 13, 13).taken(10, 11, 12, 13) == "pps-"  # two of four channels
    for channel in (10, 11, 12):  # who posts on one of them later is known as little
        assert Machine().post(10, 11, 12, 13, 14).post(channel, by=50).take(channel).known(50, 10, 13) == "pp-"


@pytest.mark.usefixtures("four")
def test_forgotten_posts_make_room_for_as_many() -> None:
    """Three of five are gone: two more fit, and the next one puts out the older half of what is there then."""
    begun = (10, 11, 12, 13, 14)
    assert Machine().post(*begun, 20, 21).taken(13, 14, 20, 21) == "ssss"
    assert Machine().post(*begun, 20, 21, 22).taken(13, 14, 20, 21, 22) == "pppss"
    assert Machine().post(*begun, 20, 21, 22).take(15).known(13, 20, 21, 22) == "pp--"
    assert Machine().post(*begun, 5, 6, 7).taken(5, 6, 7, 13) == "pppp"  # 13, 14 and 5 go, and what lies between
    assert Machine().post(*begun, 12, 12, 12, 20, 21).taken(12, 20, 21) == "pss"  # on a forgotten channel none waits


@pytest.mark.usefixtures("four")
def test_received_posts_take_no_room() -> None:
    machine = Machine()
    for _ in range(5):
        machine.post(1, 2).take(1, 2)
    assert machine.post(3, 4, 5, 6).taken(3, 4, 5, 6) == "ssss"
    assert machine.channels._channels == {}
    assert machine.post(3, 4, 5, 6, 7).taken(3, 7) == "ps"
    assert Machine().take(5).post(5).taken(5) == "s"  # a receive without a post takes nothing
    assert Machine().take(5, 5).post(3, 4, 5, 6).taken(3, 4, 5, 6) == "ssss"
    assert Machine().post(3, 3, 3, 4).taken(3, 4) == "-s"  # each receive takes one
    assert Machine().post(3, 3, 3, 4).take(3, 3, 3).known(3, 4) == "s-"
    assert Machine().post(3, 3, 3, 4, 5).taken(3, 5) == "ps"


@pytest.mark.usefixtures("four")
def test_posts_after_a_loss_are_kept_by_thread() -> None:
    """Any of them may be the one that a receive takes; they are many only if their channels are."""
    machine = Machine().post(1).post(1, by=2).post(3).lose()
    assert machine.channels._channels == {}
    assert machine.take(1).known(1, 2, 3) == "pp-"
    assert machine.post(3, by=4).take(3).known(1, 2, 3, 4) == "pppp"
    assert Machine().post(1).lose().post(1).take(1).known(1) == "p"
    assert Machine().lose().post(1, 1, 1, 1, 1, 2, 3, 4).taken(1, 2, 3, 4) == "pppp"
    kept = Machine().lose().post(11, 12, 13, 14, 1, 1)  # 11 to 13 are forgotten together
    assert kept.take(12).known(11, 12, 13, 14, 1) == "ppp--"
    kept = Machine().lose().post(11, 12, 13, 14)
    assert kept.take(12).known(11, 12, 13, 14) == "-p--"
    assert Machine().post(11, 12).lose().post(13, 14, 1).take(12).known(11, 12, 13, 14, 1) == "ppp--"


def blocks_of(*, marked: bool = True, free: int = 0, live: int = 0) -> tuple[Order, Blocks]:
    """Blocks that were freed, oldest first from 0, and live tensors of blocks from 100; one stream has work."""
    order = Order()
    blocks = Blocks(order)
    for block in range(free):
        blocks.hand_out(TensorAlloc(OpId(0), ThreadId(0), 0, block, block, StreamId(0)), block)
        if marked:
            blocks.mark(RecordStream(OpId(0), ThreadId(0), 0, block, StreamId(1)))
        order.advance(order.stream(StreamId(1)))
        blocks.give_back(TensorFree(OpId(0), ThreadId(0), 0, block), block)
    for block in range(100, 100 + live):
        blocks.hand_out(TensorAlloc(OpId(0), ThreadId(0), 0, block, block, StreamId(0)), block)
    return order, blocks


def learned(order: Order, blocks: Blocks, block: int, epoch: int) -> Proof:
    """What a thread that gets a block knows of an operation of the stream."""
    thread = ThreadId(50 + block)
    blocks.hand_out(TensorAlloc(OpId(0), thread, 0, 500 + block, block, StreamId(0)), 900)
    return order.proof(order.thread(thread), order.stream(StreamId(1)), epoch)


def test_a_block_waits_for_what_its_streams_had_queued_at_the_free() -> None:
    """That, and nothing later; a block without marks waits for nothing."""
    for block in range(4):
        order, blocks = blocks_of(free=4)
        assert learned(order, blocks, block, block + 1) is Proof.ORDERED
        assert learned(order, blocks, block, block + 2) is Proof.NONE
    order, blocks = blocks_of(free=1, marked=False)
    assert learned(order, blocks, 0, 1) is Proof.NONE
    order, blocks = blocks_of(free=1)
    blocks.hand_out(TensorAlloc(OpId(0), ThreadId(0), 0, 7, 0, StreamId(0)), 5)
    assert learned(order, blocks, 0, 1) is Proof.ORDERED  # not freed yet, as only a wrong trace can say


def test_what_a_block_has_waited_for_once_holds_for_whoever_gets_it_later() -> None:
    """Work of a stream that it is marked with only then is another matter."""
    order, blocks = blocks_of(free=1)
    blocks.hand_out(TensorAlloc(OpId(0), ThreadId(0), 0, 7, 0, StreamId(0)), 5)
    order.advance(order.stream(StreamId(1)))
    blocks.give_back(TensorFree(OpId(0), ThreadId(0), 0, 7), 6)  # nobody used it this time
    assert learned(order, blocks, 0, 1) is Proof.ORDERED
    assert learned(order, blocks, 0, 2) is Proof.NONE
    blocks.mark(RecordStream(OpId(0), ThreadId(50), 0, 500, StreamId(2)))
    order.advance(order.stream(StreamId(2)))
    blocks.give_back(TensorFree(OpId(0), ThreadId(50), 0, 500), 901)
    thread = ThreadId(60)
    blocks.hand_out(TensorAlloc(OpId(0), thread, 0, 8, 0, StreamId(0)), 902)
    known = [order.proof(order.thread(thread), order.stream(StreamId(number)), 1) for number in (1, 2)]
    assert known == [Proof.ORDERED, Proof.ORDERED]


def test_the_older_half_of_free_blocks_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then any block may have waited for anything."""
    monkeypatch.setattr(handover, "MAX_BLOCKS", 6)
    order, blocks = blocks_of(free=6)
    assert sorted(blocks._returned) == [0, 1, 2, 3, 4, 5]
    assert learned(order, blocks, 44, 1) is Proof.NONE
    order, blocks = blocks_of(free=7)
    assert sorted(blocks._returned) == [3, 4, 5, 6]
    assert learned(order, blocks, 44, 7) is Proof.UNKNOWN
    assert learned(order, blocks, 1, 1) is Proof.UNKNOWN
    assert learned(order, blocks, 6, 7) is Proof.ORDERED


def test_the_older_half_of_live_tensors_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a free of one of them is like one whose allocation was never seen: it may have had marks."""
    monkeypatch.setattr(handover, "MAX_BLOCKS", 6)
    for live, oldest in ((6, 100), (7, 103)):
        order, blocks = blocks_of(live=live)
        assert sorted(blocks._tensors) == list(range(oldest, 100 + live))
        order.advance(order.stream(StreamId(1)))
        for tensor in range(oldest, 100 + live):
            assert blocks.give_back(TensorFree(OpId(0), ThreadId(0), 0, tensor), 300) == tensor
        assert blocks._tensors == {}
        assert learned(order, blocks, 44, 1) is Proof.NONE
        assert blocks.give_back(TensorFree(OpId(0), ThreadId(0), 0, 99), 300) is None
        assert learned(order, blocks, 45, 1) is Proof.UNKNOWN


def test_marks_of_a_tensor_from_before_a_loss_may_be_lost() -> None:
    for lost_at, proof in ((101, Proof.UNKNOWN), (100, Proof.NONE)):
        order, blocks = blocks_of(live=1)  # handed out at 100
        order.advance(order.stream(StreamId(1)))
        order.lose(lost_at)
        assert blocks.give_back(TensorFree(OpId(0), ThreadId(0), 0, 100), 300) == 100
        assert learned(order, blocks, 44, 1) is proof


@pytest.mark.parametrize("lost", [False, True])
def test_after_a_loss_nobody_knows_which_post_a_receive_takes(lost: bool) -> None:
    """What the only post that is left may have told is in doubt, for another may have come before it."""
    history = History("F:w5 h<F").records
    stream = next(record.stream for record in history if isinstance(record, Kernel))
    poster, taker = ThreadId(0), ThreadId(1)
    page = next(record.accesses for record in history if isinstance(record, Kernel))
    gap = [Lost(NO_OP, poster, 0, 1, DropReason.RING_FULL)] if lost else []
    write = Memcpy(OpId(92), taker, 9, StreamId(stream + 7), 0, 3, 8, ALL_LAYERS, page)
    records = [*history, ThreadPost(OpId(90), poster, 7, 1), *gap, ThreadRecv(OpId(91), taker, 8, 1), write]
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    assert [finding.proof for finding in sink.findings] == ([Proof.UNKNOWN] if lost else [])
