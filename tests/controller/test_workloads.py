"""Workloads: the trace file's format and errors, and a generator that matches a real hour."""

import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_obs.controller.workload_file import MAX_LINE_BYTES, load_jsonl
from hicache_obs.controller.workloads import Request, generate, statistics
from hicache_obs.errors import ConfigError, WorkloadError

GOOD = {"timestamp": 5, "input_length": 1000, "output_length": 320, "hash_ids": [0, 7]}


def write(path: Path, *lines: object) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text)
    return path


def load(path: Path, **options: Any) -> list[Request]:
    return load_jsonl(path, **{"tokens_per_block": 16, "vocabulary": 100, **options})


def test_a_line_is_a_request(tmp_path: Path) -> None:
    first, second = load(write(tmp_path / "t.jsonl", GOOD, {**GOOD, "timestamp": 9, "priority": 1}))
    assert (first.request_id, first.arrival_ms, first.output_length) == (0, 5, 10)
    assert (second.request_id, second.arrival_ms) == (1, 9)
    assert first.prompt.dtype == np.int64
    assert len(first.prompt) == 16 + 15  # 488 of the second block's 512 tokens
    assert first.prompt.min() >= 0
    assert first.prompt.max() < 100


@pytest.mark.parametrize(
    ("tokens_per_block", "input_length", "prompt", "output_length", "output"),
    [(16, 512, 16, 32, 1), (16, 513, 17, 1, 1), (16, 600, 19, 48, 2), (16, 1024, 32, 512, 16), (512, 513, 513, 7, 7)],
)
def test_lengths_scale_with_the_block(
    tmp_path: Path, tokens_per_block: int, input_length: int, prompt: int, output_length: int, output: int
) -> None:
    ids = list(range(-(-input_length // 512)))
    line = {"timestamp": 0, "input_length": input_length, "output_length": output_length, "hash_ids": ids}
    (request,) = load(write(tmp_path / "t.jsonl", line), tokens_per_block=tokens_per_block)
    assert (len(request.prompt), request.output_length) == (prompt, output)


def test_equal_ids_are_equal_tokens_and_others_are_not(tmp_path: Path) -> None:
    lines = [{**GOOD, "input_length": 1024, "hash_ids": ids} for ids in ([3, 4], [3, 5], [4, 3])]
    a, b, c = (request.prompt for request in load(write(tmp_path / "t.jsonl", *lines)))
    assert (a[:16] == b[:16]).all()
    assert (a[16:] != b[16:]).any()
    assert (c == np.roll(a, 16)).all()


def test_requests_come_in_order_of_arrival(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *({**GOOD, "timestamp": t} for t in (7, 3, 7, 1)))
    assert [(r.arrival_ms, r.request_id) for r in load(path)] == [(1, 3), (3, 1), (7, 0), (7, 2)]


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "", GOOD, "not JSON")
    assert len(load(path, limit=2)) == 2
    with pytest.raises(WorkloadError, match=r"t\.jsonl: line 4: not JSON: "):
        load(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**GOOD, "output_length": -3}, "output_length: -3; expected an integer ≥ 1"),
        ({**GOOD, "input_length": 0}, "input_length: 0; expected an integer ≥ 1"),
        ({**GOOD, "timestamp": -1}, "timestamp: -1; expected an integer ≥ 0"),
        ({**GOOD, "timestamp": 1.5}, "timestamp: 1.5; expected an integer ≥ 0"),
        ({**GOOD, "timestamp": True}, "timestamp: true; expected an integer ≥ 0"),
        ({**GOOD, "input_length": 10**30}, "input_length: 1000000000000000000000000000000; expected an integer ≥ 1"),
        ({**GOOD, "output_length": "9" * 99}, f'output_length: "{"9" * 36}...; expected an integer ≥ 1'),
        ({**GOOD, "hash_ids": [0, -7]}, "hash_ids[1]: -7; expected an integer ≥ 0"),
        ({**GOOD, "hash_ids": [0, 2**63]}, "hash_ids[1]: 9223372036854775808; expected an integer ≥ 0"),
        ({**GOOD, "hash_ids": None}, "hash_ids: null; expected a list of integers ≥ 0"),
        (
            {**GOOD, "hash_ids": [0]},
            "hash_ids: 1 ids for an input_length of 1000; expected 2, one per started block of 512 tokens",
        ),
        (
            {**GOOD, "hash_ids": [0, 7, 8]},
            "hash_ids: 3 ids for an input_length of 1000; expected 2, one per started block of 512 tokens",
        ),
        (
            {"timestamp": 0, "input_length": 1, "hash_ids": [0]},
            "output_length: missing; expected the keys timestamp, input_length, output_length, hash_ids",
        ),
        ("[1, 2]", "[1,2]; expected a JSON object"),
        ("{", "not JSON: Input data was truncated"),
        ('{"a": 1} x', "not JSON: JSON is malformed: trailing characters (byte 10)"),
        (
            "[" * (MAX_LINE_BYTES + 1),
            f"longer than {MAX_LINE_BYTES} bytes; expected one request per line",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "t.jsonl", *[GOOD] * 16, line, GOOD)
    with pytest.raises(WorkloadError) as refused:
        load(path)
    assert str(refused.value) == f"{path}: line 17: {message}"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"timestamp": "\xff\xfe"}\n')
    with pytest.raises(WorkloadError, match=r"t\.jsonl: line 1: "):
        load(path)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(WorkloadError, match=r"t\.jsonl: no requests; expected one JSON object per line$"):
        load(tmp_path / "t.jsonl")


@pytest.mark.parametrize(("name", "message"), [("absent", "No such file or directory"), ("", "Is a directory")])
def test_unreadable_file(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(WorkloadError) as refused:
        load(tmp_path / name)
    assert str(refused.value) == f"{tmp_path / name}: {message}"


def make(n: int = 40, **options: Any) -> list[Request]:
    return generate(n, **{"seed": 1, "tokens_per_block": 16, "vocabulary": 100, **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load(Path("x"), tokens_per_block=0), "tokens_per_block: 0; expected an integer ≥ 1"),
        (lambda: load(Path("x"), vocabulary=1), "vocabulary: 1; expected an integer ≥ 2"),
        (lambda: load(Path("x"), limit=0), "limit: 0; expected an integer ≥ 1"),
        (lambda: make(0), "n: 0; expected an integer ≥ 1"),
        (lambda: make(seed=-1), "seed: -1; expected an integer ≥ 0"),
        (lambda: make(conversations=0), "conversations: 0; expected an integer ≥ 1"),
        (lambda: make(shared_blocks=3, max_blocks=3), "max_blocks: 3; expected an integer ≥ 4"),
        (lambda: make(max_output=0), "max_output: 0; expected an integer ≥ 1"),
        (lambda: make(reuse=1.5), "reuse: 1.5; expected a share in 0..1"),
        (lambda: make(requests_per_second=0.0), "requests_per_second: 0.0; expected a number > 0"),
        (lambda: statistics([], tokens_per_block=16), "requests: 0; expected an integer ≥ 1"),
    ],
)
def test_argument_out_of_range(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        call()
    assert str(refused.value) == message


def test_generator_is_a_function_of_its_arguments() -> None:
    def plain(requests: list[Request]) -> list[tuple[int, int, list[int], int]]:
        return [(r.request_id, r.arrival_ms, r.prompt.tolist(), r.output_length) for r in requests]

    assert plain(make()) == plain(make())
    assert plain(make()) != plain(make(seed=2))


def test_generator_keeps_its_bounds() -> None:
    requests = make(300, max_blocks=12, max_output=9, reuse=0.7, conversations=6, shared_blocks=2)
    assert [request.request_id for request in requests] == list(range(300))
    arrivals = [request.arrival_ms for request in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    for request in requests:
        assert 2 * 16 < len(request.prompt) <= 12 * 16
        assert 1 <= request.output_length <= 9
        assert (request.prompt[: 2 * 16] == requests[0].prompt[: 2 * 16]).all()
        assert request.prompt.min() >= 0
        assert request.prompt.max() < 100


def test_later_request_of_a_conversation_extends_the_earlier_one() -> None:
    """With every request a continuation of the only conversation, each prompt is the last one and more."""
    requests = make(5, reuse=1.0, conversations=1, turn_median=10)  # a third of a token
    for earlier, later in pairwise(requests):
        assert len(later.prompt) > len(earlier.prompt)
        assert (later.prompt[: len(earlier.prompt)] == earlier.prompt).all()


def test_without_reuse_only_the_system_prompt_is_shared() -> None:
    requests = make(200, reuse=0.0)
    figures = statistics(requests, tokens_per_block=16)
    assert figures.prefix_hit_share * figures.blocks_mean * 200 == pytest.approx(199)
    assert statistics(make(200, reuse=0.0, shared_blocks=0), tokens_per_block=16).prefix_hit_share == 0


def test_evicted_prefixes_come_back() -> None:
    """In a demo-sized workload most conversations pause while others fill more pages than a small pool has."""
    requests = make(100, reuse=0.7, conversations=6, max_blocks=12)
    last_seen: dict[bytes, int] = {}
    pauses = []
    for i, request in enumerate(requests):
        key = request.prompt[16:48].tobytes()  # the conversation: its first two own blocks
        if key in last_seen:
            pauses.append(i - last_seen[key])
        last_seen[key] = i
    assert len(pauses) > 40
    assert float(np.median(pauses)) >= 3


def test_statistics_by_hand() -> None:
    def request(i: int, arrival_ms: int, prompt: list[int], output: int) -> Request:
        return Request(i, arrival_ms, np.array(prompt, dtype=np.int64), output)

    figures = statistics(
        [
            request(0, 0, [1, 2, 3, 4], 1),
            request(1, 500, [1, 2, 3, 4, 5], 2),  # two blocks hit, one partial
            request(2, 2000, [9, 9, 3, 4], 3),  # block "3 4" is known, but not behind "9 9"
        ],
        tokens_per_block=2,
    )
    assert asdict(figures) == {
        "requests": 3,
        "input_p50": 4 * 256,
        "input_p95": pytest.approx(4.9 * 256),
        "input_mean": pytest.approx(13 / 3 * 256),
        "output_p50": 2 * 256,
        "output_p95": pytest.approx(2.9 * 256),
        "output_mean": 2 * 256,
        "blocks_mean": pytest.approx(7 / 3),
        "prefix_hit_share": pytest.approx(2 / 7),
        "requests_per_second": 1.5,
    }


FIGURES = {
    "input_p50": 6909,
    "input_p95": 39550,
    "input_mean": 12035,
    "output_p50": 350,
    "output_p95": 698,
    "output_mean": 343,
    "blocks_mean": 24.0,
    "prefix_hit_share": 0.366,
    "requests_per_second": 12031 / 3537,
}


@pytest.mark.parametrize("seed", [0, 1])
def test_generator_matches_the_real_hour(seed: int) -> None:
    found = asdict(statistics(make(12_031, seed=seed), tokens_per_block=16))
    for name, figure in FIGURES.items():
        assert found[name] == pytest.approx(figure, rel=0.1), name


def test_the_real_hour_has_these_figures(shared_data: Path) -> None:
    requests = load(shared_data / "data" / "mooncake_conversation_trace.jsonl", vocabulary=1000)
    assert len(requests) == 12_031
    found = asdict(statistics(requests, tokens_per_block=16))
    for name, figure in FIGURES.items():
        assert found[name] == pytest.approx(figure, rel=0.01), name  # scaling to 16 tokens rounds
