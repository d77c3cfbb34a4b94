"""Both model runners: tokens depend on what is in the pool, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from hicache_obs.controller.batch import BatchMode, ForwardBatch, RoundResult
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.controller.model_runner import ModelRunner, to_device
from hicache_obs.controller.pattern import PatternRunner
from hicache_obs.controller.pools import DevicePool, KVLayout
from hicache_obs.controller.transformer import TransformerRunner
from hicache_obs.errors import ControllerError
from hicache_obs.records import Mode, PageIds, Space, Work, page_ids
from hicache_obs.streams import SCHEDULES, open_device
from hicache_obs.streams.guard import PoolGuard
from hicache_obs.streams.protocol import Device

PAGE = 8
LAYOUTS = {
    "transformer": KVLayout(layers=3, pages=128, page_size=PAGE, heads=2, head_dim=8),
    "pattern": KVLayout(layers=3, pages=128, page_size=PAGE, heads=2, head_dim=2),
}
VOCABULARY = 512
BOTH = pytest.mark.parametrize("model", ["transformer", "pattern"])


@dataclass
class Row:
    """One request: its pages, how many tokens are cached, and the rounds it was in."""

    slot: int
    pages: list[int] = field(default_factory=list)
    tenancies: list[int] = field(default_factory=list)
    cached: int = 0
    rounds: list[tuple[RoundResult, int]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [int(result.next_tokens[index]) for result, index in self.rounds]


class Bench:
    """A runner on a device, and just enough of an engine to make batches for it."""

    def __init__(self, model: str, device: Device) -> None:
        layout = LAYOUTS[model]
        self.device = device
        self.pool = DevicePool(layout, device.torch_device)
        self.ledger = ContentLedger(layout.layers, 1024, device.torch_device)
        self.runner: ModelRunner = (
            TransformerRunner(device, self.pool, self.ledger, seed=5, vocabulary=VOCABULARY)
            if model == "transformer"
            else PatternRunner(device, self.pool, self.ledger, vocabulary=VOCABULARY)
        )
        # Never page 0: unused cells of a page table name it.
        self._free = [int(page) for page in np.random.default_rng(0).permutation(np.arange(1, layout.pages))]
        self._slots = 0
        self._rounds = 0

    def row(self, shared: Row | None = None, tokens: int = 0) -> Row:
        """A new request, its first ``tokens`` cached in the pages of ``shared``."""
        self._slots += 1
        row = Row(self._slots)
        if shared is not None:
            assert tokens % PAGE == 0
            row.pages, row.tenancies = shared.pages[: tokens // PAGE], shared.tenancies[: tokens // PAGE]
            row.cached = tokens
        return row

    def restored(self, row: Row, tokens: int) -> tuple[Row, list[int]]:
        """A request like ``row`` whose prefix counts as restored in place, and the sources of its tenancies."""
        copy = self.row(row, tokens)
        sources, copy.tenancies = copy.tenancies, self.ledger.open(tokens // PAGE).tolist()
        return copy, sources

    def batch(
        self, rows: Sequence[Row], prompts: Sequence[Sequence[int]] = (), sources: Sequence[int] = ()
    ) -> ForwardBatch:
        """An extend round of ``prompts``, or a decode round; ``sources``: of the first row's restored prefix."""
        new = [len(prompt) for prompt in prompts] or [1] * len(rows)
        written = set()
        for row, count in zip(rows, new, strict=True):
            missing = -(-(row.cached + count) // PAGE) - len(row.pages)
            row.pages += [self._free.pop() for _ in range(missing)]
            row.tenancies += self.ledger.open(missing).tolist()
            written |= set(row.pages[row.cached // PAGE : -(-(row.cached + count) // PAGE)])
        width = max(len(row.pages) for row in rows)

        def table(cells: list[list[int]]) -> PageIds:
            return np.array([ids + [0] * (width - len(ids)) for ids in cells], dtype=np.int64)

        self._rounds += 1
        batch = ForwardBatch(
            round_id=self._rounds,
            mode=BatchMode.EXTEND if prompts else BatchMode.DECODE,
            token_slots=page_ids(row.slot for row in rows),
            input_tokens=page_ids(token for prompt in prompts for token in prompt),
            prefix_lens=page_ids(row.cached for row in rows),
            new_lens=page_ids(new),
            page_table=table([row.pages for row in rows]),
            page_tenancies=table([row.tenancies for row in rows]),
            read_pages=page_ids(sorted({page for row in rows for page in row.pages})),
            write_pages=page_ids(sorted(written)),
            check_pages=page_ids(rows[0].pages[: len(sources)]),
            check_tenancies=page_ids(rows[0].tenancies[: len(sources)]),
            check_sources=page_ids(sources),
        )
        for name in ForwardBatch.__slots__:
            if isinstance(getattr(batch, name), np.ndarray):
                getattr(batch, name).flags.writeable = False
        for row, count in zip(rows, new, strict=True):
            row.cached += count
        return batch

    def extend(
        self,
        rows: Sequence[Row],
        prompts: Sequence[Sequence[int]],
        *,
        sources: Sequence[int] = (),
        layer_wait: Callable[[int], None] | None = None,
    ) -> None:
        self._forward(rows, self.batch(rows, prompts, sources), layer_wait)

    def decode(self, rows: Sequence[Row], rounds: int = 1) -> None:
        """Launch ``rounds`` rounds without looking at the tokens of any."""
        for _ in range(rounds):
            self._forward(rows, self.batch(rows), None)

    def overwrite(self, page: int, slot: int, value: float | None = None) -> None:
        """Change K and V of one token in the pool, on all layers: negate it, or set it to ``value``."""

        def change() -> None:
            for tensor in (self.pool.k, self.pool.v):
                old = tensor[:, page, slot]
                old.copy_(-old - 1 if value is None else torch.full_like(old, value))

        self.launch(change)

    def launch(self, fn: Callable[[], None]) -> None:
        with self.device.stream(self.runner.forward_stream):
            self.device.launch(fn, Work(site="test"))

    def _forward(self, rows: Sequence[Row], batch: ForwardBatch, layer_wait: Callable[[int], None] | None) -> None:
        result = self.runner.forward(batch, layer_wait=layer_wait)
        assert result.round_id == batch.round_id
        for index, row in enumerate(rows):
            row.rounds.append((result, index))


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench() -> Iterator[MakeBench]:
    """``make_bench(model, "threads" | "cuda" | "virtual-<schedule>")``."""
    with ExitStack() as stack:

        def make(model: str, backend: str = "threads") -> Bench:
            name, _, schedule = backend.partition("-")
            device = open_device(name, schedule=schedule or "adversarial", seed=3)
            stack.callback(device.close)
            return Bench(model, device)

        yield make


def prompts(count: int, *, seed: int = 0, shortest: int = 3, longest: int = 45) -> list[list[int]]:
    random = np.random.default_rng(seed)
    lengths = random.integers(shortest, longest, count)
    return [random.integers(0, VOCABULARY, length).tolist() for length in lengths]


def generate(bench: Bench, texts: Sequence[Sequence[int]], rounds: int, *, group: int) -> list[list[int]]:
    """Tokens of each text, served in batches of ``group`` rows."""
    everyone = [bench.row() for _ in texts]
    for begin in range(0, len(texts), group):
        rows = everyone[begin : begin + group]
        bench.extend(rows, texts[begin : begin + group])
        bench.decode(rows, rounds)
    bench.device.synchronize()
    return [row.tokens for row in everyone]


@BOTH
@pytest.mark.parametrize("group", [1, 3])
def test_tokens_do_not_depend_on_the_batch(model: str, group: int, make_bench: MakeBench) -> None:
    texts = prompts(9)
    together = generate(make_bench(model), texts, 39, group=9)
    assert generate(make_bench(model), texts, 39, group=group) == together
    assert len({tuple(tokens) for tokens in together}) == 9
    assert len({token for tokens in together for token in tokens}) > 100  # 360 tokens, and no short cycle


@BOTH
def test_rows_join_and_leave_between_rounds(model: str, make_bench: MakeBench) -> None:
    first, second = prompts(2)
    alone = generate(make_bench(model), [first, second], 8, group=1)
    bench = make_bench(model)
    a, b = bench.row(), bench.row()
    bench.extend([a], [first])
    bench.decode([a], 3)
    bench.extend([b], [second])
    bench.decode([b, a], 5)
    bench.decode([b], 3)
    bench.device.synchronize()
    assert [a.tokens, b.tokens] == alone


@BOTH
@pytest.mark.parametrize(
    "backend",
    [*(f"virtual-{schedule}" for schedule in SCHEDULES), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_every_device_gives_the_tokens_of_threads(model: str, backend: str, make_bench: MakeBench) -> None:
    texts = prompts(4)
    expected = generate(make_bench(model), texts, 12, group=4)
    assert generate(make_bench(model, backend), texts, 12, group=4) == expected


@BOTH
@pytest.mark.parametrize("cached", [PAGE, 3 * PAGE])
def test_a_cached_prefix_gives_the_tokens_of_a_recomputed_one(model: str, cached: int, make_bench: MakeBench) -> None:
    (text,) = prompts(1, shortest=30)
    (recomputed,) = generate(make_bench(model), [text], 20, group=1)
    bench = make_bench(model)
    owner = bench.row()
    bench.extend([owner], [text[:cached]])
    others = prompts(3, seed=1)
    sharer, *rest = bench.row(owner, cached), *(bench.row() for _ in others)
    bench.extend([*rest, sharer], [*others, text[cached:]])
    bench.decode([sharer, *rest], 20)
    bench.device.synchronize()
    assert sharer.tokens == recomputed


@BOTH
def test_a_retracted_request_goes_on_with_the_same_tokens(model: str, make_bench: MakeBench) -> None:
    (text,) = prompts(1)
    (expected,) = generate(make_bench(model), [text], 20, group=1)
    bench = make_bench(model)
    resumed = bench.row()
    bench.extend([resumed], [text + expected[:7]])  # the extend round samples where a decode round did
    bench.decode([resumed], 13)
    bench.device.synchronize()
    assert resumed.tokens == expected[7:]


@BOTH
@pytest.mark.parametrize("backend", ["threads", "virtual-adversarial"])
def test_one_segment_per_layer_gives_the_tokens_of_one_segment(model: str, backend: str, make_bench: MakeBench) -> None:
    texts = prompts(3)
    expected = generate(make_bench(model), texts, 1, group=3)
    bench = make_bench(model, backend)
    rows = [bench.row() for _ in texts]
    waited: list[tuple[int, int]] = []

    def layer_wait(layer: int) -> None:
        assert bench.device.current_stream().stream_id == bench.runner.forward_stream.stream_id
        waited.append((layer, bench.runner.launched_segments))

    bench.extend(rows, texts, layer_wait=layer_wait)
    assert waited == [(0, 0), (1, 1), (2, 2)]
    bench.decode(rows)
    assert bench.runner.launched_segments == 4
    bench.device.synchronize()
    assert [row.tokens for row in rows] == expected


@BOTH
def test_the_work_of_a_segment_says_exactly_what_it_touches(
    model: str, make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(model)
    launched: list[Work] = []
    launch = bench.device.launch

    def spy(fn: Callable[[], None], work: Work) -> None:
        launched.append(work)
        launch(fn, work)

    monkeypatch.setattr(bench.device, "launch", spy)
    rows = [bench.row(), bench.row()]
    extend = bench.batch(rows, [[1] * 20, [2] * 5])
    bench.runner.forward(extend, layer_wait=lambda layer: None)
    decode = bench.batch(rows)
    bench.runner.forward(decode)
    bench.device.synchronize()

    assert [(work.site, work.layers, work.group, work.direction) for work in launched] == [
        ("forward", (0, 1), 1, None),
        ("forward", (1, 2), 1, None),
        ("forward", (2, 3), 1, None),
        ("forward", (0, 3), 2, None),
    ]
    for work, batch in zip(launched, [extend, extend, extend, decode], strict=True):
        read, write = work.accesses
        assert (read.space, read.mode, read.pool) == (Space.DEVICE, Mode.READ, 0)
        assert (write.space, write.mode, write.pool) == (Space.DEVICE, Mode.WRITE, 0)
        assert read.ids is batch.read_pages
        assert write.ids is batch.write_pages
    token_bytes = bench.pool.layout.page_bytes_per_layer // PAGE
    assert [work.size_bytes for work in launched] == [
        *[(4 * PAGE + 25) * token_bytes] * 3,
        3 * (4 * PAGE + 2) * token_bytes,
    ]


@BOTH
def test_the_pool_is_touched_inside_launches_only(model: str, make_bench: MakeBench) -> None:
    bench = make_bench(model, "virtual-lazy")
    rows = [bench.row(), bench.row()]
    with PoolGuard(bench.device, [bench.pool.k, bench.pool.v, bench.runner.token_buffer]):
        bench.extend(rows, prompts(2), layer_wait=lambda layer: None)
        bench.decode(rows, 2)
        bench.device.synchronize()
    assert len(rows[0].tokens) == 3


@BOTH
def test_forward_does_not_wait_and_uses_the_stream_it_is_given(model: str, make_bench: MakeBench) -> None:
    bench = make_bench(model)
    bench.runner.forward_stream = bench.device.Stream("other")
    gate = bench.device.gate()
    gate.hold(bench.runner.forward_stream)
    row = bench.row()
    bench.extend([row], [[1, 2, 3]])
    bench.decode([row], 2)
    done = row.rounds[-1][0].done
    assert not done.query()
    gate.open()
    done.synchronize()
    assert row.tokens == generate(make_bench(model), [[1, 2, 3]], 2, group=1)[0]


def foreign_memory(bench: Bench, rows: Sequence[Row]) -> None:
    """Spoil every place of the pool that does not hold a cached token of ``rows``."""
    keep = torch.zeros(bench.pool.layout.pages, PAGE, dtype=torch.bool)
    for row in rows:
        for position in range(row.cached):
            keep[row.pages[position // PAGE], position % PAGE] = True

    def spoil() -> None:
        for tensor in (bench.pool.k, bench.pool.v):
            tensor[:, ~keep] = torch.nan

    bench.launch(spoil)


@BOTH
def test_only_tokens_of_the_row_are_read(model: str, make_bench: MakeBench) -> None:
    """Padding, unused cells of the page table and unwritten slots must not reach a result: NaN would."""
    texts = prompts(4)
    expected = generate(make_bench(model), texts, 2, group=4)
    bench = make_bench(model)
    rows = [bench.row() for _ in texts]
    foreign_memory(bench, rows)
    bench.extend(rows, texts)
    for _ in range(2):
        foreign_memory(bench, rows)
        bench.decode(rows)
    bench.device.synchronize()
    assert [row.tokens for row in rows] == expected


@BOTH
def test_a_spoiled_row_spoils_no_other(model: str, make_bench: MakeBench) -> None:
    texts = prompts(3)
    expected = generate(make_bench(model), texts, 9, group=3)
    bench = make_bench(model)
    rows = [bench.row() for _ in texts]
    bench.extend(rows, texts)
    for slot in range(min(PAGE, rows[1].cached)):
        bench.overwrite(rows[1].pages[0], slot, float("nan"))
    bench.decode(rows, 9)
    bench.device.synchronize()
    assert [rows[0].tokens, rows[2].tokens] == [expected[0], expected[2]]
    assert rows[1].tokens != expected[1]
    assert all(0 <= token < VOCABULARY for token in rows[1].tokens)


@BOTH
@pytest.mark.parametrize("place", [None, 0, 7, 13, 23])
def test_one_overwritten_token_changes_tokens_and_is_flagged(
    model: str, place: int | None, make_bench: MakeBench
) -> None:
    (text,) = prompts(1, shortest=30, longest=40)
    (expected,) = generate(make_bench(model), [text], 30, group=1)
    bench = make_bench(model)
    owner = bench.row()
    bench.extend([owner], [text[: 3 * PAGE]])
    restored, sources = bench.restored(owner, 3 * PAGE)
    if place is not None:
        bench.overwrite(restored.pages[place // PAGE], place % PAGE)
    bench.extend([restored], [text[3 * PAGE :]], sources=sources, layer_wait=lambda layer: None)
    bench.decode([restored], 30)
    bench.device.synchronize()
    assert bench.ledger.checks == 3 * bench.pool.layout.layers
    if place is None:
        assert restored.tokens == expected
        assert bench.ledger.corrupted().tolist() == []
    else:
        assert restored.tokens != expected
        assert model != "pattern" or restored.tokens[0] != expected[0]  # it reads every token it attends to
        assert bench.ledger.corrupted().tolist() == [restored.tenancies[place // PAGE]]


@BOTH
def test_a_page_of_another_request_changes_the_tokens_of_decode_rounds(model: str, make_bench: MakeBench) -> None:
    texts = prompts(2, shortest=20)
    expected = generate(make_bench(model), texts, 8, group=2)
    bench = make_bench(model)
    rows = [bench.row(), bench.row()]
    bench.extend(rows, texts)
    target, source = rows[0].pages[1], rows[1].pages[1]

    def copy() -> None:
        for tensor in (bench.pool.k, bench.pool.v):
            tensor[:, target] = tensor[:, source]

    bench.launch(copy)
    bench.decode(rows, 8)
    bench.device.synchronize()
    assert rows[0].tokens != expected[0]
    assert rows[1].tokens == expected[1]


@BOTH
def test_what_the_round_itself_writes_is_what_the_ledger_expects(model: str, make_bench: MakeBench) -> None:
    """Pages filled by extend and by decode rounds, also one by one, are all found intact when read again."""
    bench = make_bench(model)
    owner = bench.row()
    bench.extend([owner], [prompts(1)[0][:5]])
    bench.decode([owner], 3 * PAGE)
    restored, sources = bench.restored(owner, 3 * PAGE)
    bench.extend([restored], [[1]], sources=sources)
    bench.device.synchronize()
    assert bench.ledger.checks == 3 * bench.pool.layout.layers
    assert bench.ledger.corrupted().tolist() == []


@BOTH
def test_a_batch_that_cannot_run_is_refused(model: str, make_bench: MakeBench) -> None:
    bench = make_bench(model)
    row = bench.row()
    with pytest.raises(ControllerError, match=r"^round 1: new_lens is \[0\]; every row adds a token$"):
        bench.runner.forward(bench.batch([row], [[]]))
    row.slot = 1024
    with pytest.raises(ControllerError, match=r"^round 2: token_slots is \[1024\]; slots are 0..1023$"):
        bench.extend([row], [[1]])
    empty = np.zeros(0, dtype=np.int64)
    nothing = ForwardBatch(3, BatchMode.DECODE, *[empty] * 4, *[empty.reshape(0, 1)] * 2, *[empty] * 5)
    with pytest.raises(ControllerError, match=r"^round 3 has no rows; a round needs at least one$"):
        bench.runner.forward(nothing)
    assert bench.runner.launched_segments == 0


def test_runners_refuse_a_pool_they_cannot_use(make_bench: MakeBench) -> None:
    device = make_bench("pattern").device
    ledger = ContentLedger(1, 1, "cpu")
    single = DevicePool(KVLayout(1, 2, 4, 1, 2, torch.float32), "cpu")
    odd = DevicePool(KVLayout(1, 2, 4, 1, 3), "cpu")
    with pytest.raises(ControllerError, match=r"dtype torch.float32 and head_dim 2; the transformer needs float64"):
        TransformerRunner(device, single, ledger, seed=0)
    with pytest.raises(ControllerError, match=r"and head_dim 3; the transformer needs float64 and an even head_dim"):
        TransformerRunner(device, odd, ledger, seed=0)
    with pytest.raises(ControllerError, match=r"dtype torch.float32; the pattern model's integers need float64"):
        PatternRunner(device, single, ledger, vocabulary=9)


def test_to_device_aliases_what_it_can_on_a_cpu() -> None:
    array = np.arange(4)
    assert np.shares_memory(to_device(array, "cpu").numpy(), array)
    array.flags.writeable = False
    assert to_device(array, "cpu").tolist() == [0, 1, 2, 3]
    assert to_device(np.arange(4)[::-1], "cpu").tolist() == [3, 2, 1, 0]
