"""Reads workload files: one JSON object per request and line, as public request traces come."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import Annotated, Any, BinaryIO, Final

import msgspec

from hicache_obs.controller.workloads import TRACE_BLOCK, Request, block_prompt, require, scaled
from hicache_obs.errors import WorkloadError

MAX_LINE_BYTES: Final = 2**20
"""Longest line read; a request of the longest context served today needs a hundredth of it."""
_MAX_INT: Final = 2**53


class _Line(msgspec.Struct):
    """One line of a trace file."""

    timestamp: Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=_MAX_INT)]
    output_length: Annotated[int, msgspec.Meta(ge=1, le=_MAX_INT)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]


_LOWEST: Final = {"timestamp": 0, "input_length": 1, "output_length": 1}
_DECODER: Final = msgspec.json.Decoder(_Line)


def load_jsonl(
    path: str | PathLike[str], *, tokens_per_block: int, vocabulary: int, limit: int | None = None
) -> list[Request]:
    """The first ``limit`` requests of a trace file, in order of arrival.

    A line is a JSON object with ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens) and
    ``hash_ids`` (one per started block of 512 input tokens); other keys are ignored, as are blank lines. Read
    line by line: memory grows with the requests kept only.

    Args:
        path: The file.
        tokens_per_block: Tokens each block stands for here. The partial last block shrinks in proportion and
            keeps at least one token, the output likewise.
        vocabulary: Tokens are in ``0..vocabulary - 1``, a fixed function of block id and position.
        limit: Most lines to read; ``None`` reads all.

    Raises:
        WorkloadError: The file or a line of it cannot be used; the message names both.
        ConfigError: An argument is out of range.
    """
    require(tokens_per_block=(tokens_per_block, 1), vocabulary=(vocabulary, 2))
    if limit is not None:
        require(limit=(limit, 1))
    requests: list[Request] = []
    try:
        with open(path, "rb") as file:
            for line in _lines(file, str(path)):
                prompt = block_prompt(line.hash_ids, line.input_length, tokens_per_block, vocabulary)
                output = scaled(line.output_length, tokens_per_block)
                requests.append(Request(len(requests), line.timestamp, prompt, output))
                if len(requests) == limit:
                    break
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error
    if not requests:
        raise WorkloadError(f"{path}: no requests; expected one JSON object per line")
    return sorted(requests, key=lambda request: request.arrival_ms)


def _lines(file: BinaryIO, path: str) -> Iterator[_Line]:
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        where = f"{path}: line {number}"
        if len(raw) > MAX_LINE_BYTES:
            raise WorkloadError(f"{where}: longer than {MAX_LINE_BYTES} bytes; expected one request per line")
        if not raw.strip():
            continue
        try:
            line = _DECODER.decode(raw)
        except msgspec.DecodeError as error:
            raise WorkloadError(f"{where}: {_fault(raw, error)}") from error
        needed = -(-line.input_length // TRACE_BLOCK)
        if len(line.hash_ids) != needed:
            raise WorkloadError(
                f"{where}: hash_ids: {len(line.hash_ids)} ids for an input_length of {line.input_length}; "
                f"expected {needed}, one per started block of {TRACE_BLOCK} tokens"
            )
        yield line


def _fault(raw: bytes, error: msgspec.DecodeError) -> str:
    """What is wrong with a line that was refused: the key, its value, and what is allowed."""
    try:
        line: Any = msgspec.json.decode(raw)
    except msgspec.DecodeError as broken:
        return f"not JSON: {broken}"
    if not isinstance(line, dict):
        return f"{_shown(line)}; expected a JSON object"
    for key in _Line.__struct_fields__:
        if key not in line:
            return f"{key}: missing; expected the keys {', '.join(_Line.__struct_fields__)}"
    for key, lowest in _LOWEST.items():
        if not _is_integer(line[key], lowest, _MAX_INT):
            return f"{key}: {_shown(line[key])}; expected an integer ≥ {lowest}"
    if not isinstance(line["hash_ids"], list):
        return f"hash_ids: {_shown(line['hash_ids'])}; expected a list of integers ≥ 0"
    for i, value in enumerate(line["hash_ids"]):
        if not _is_integer(value, 0, 2**63 - 1):
            return f"hash_ids[{i}]: {_shown(value)}; expected an integer ≥ 0"
    return str(error)


def _is_integer(value: object, lowest: int, highest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else f"{text[:37]}..."
