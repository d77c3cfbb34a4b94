"""Stand-ins of SGLang objects, and a session with hooks on them."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from hicache_obs.readers.ring import read_ring
from hicache_obs.sglang.guard import around
from hicache_obs.sglang.page_ids import PageReader
from hicache_obs.sglang.session import Session
from hicache_obs.sglang.table import SGLANG_ADAPTERS


class Probe:
    """An event pair that is complete as soon as it is over."""

    def __init__(self, log):
        self.log, self.over = log, False

    def begin(self, stream):
        self.log.append(("begin", stream.cuda_stream))

    def end(self, stream):
        self.log.append(("end", stream.cuda_stream))
        self.over = True

    def ready(self):
        return self.over

    def times_ns(self):
        return 100, 200


class Stream:
    def __init__(self, handle):
        self.cuda_stream = handle

    def wait_stream(self, other):
        self.waited_for = other


class Server:
    """A session and what the hooks are called with."""

    stream = Stream

    def __init__(self, **options):
        self.current = Stream(5)
        self.log = []
        self.clock = SimpleNamespace(probe=lambda: Probe(self.log), clock_error_ns=3)
        self.session = Session(
            "SGLang 0.5.23",
            current_stream=lambda: self.current,
            reader=PageReader(lambda: None, lambda ids: None),
            timing=lambda: self.clock,
            **options,
        )
        assert self.session.recording
        self.pool = SimpleNamespace(page_size=4, layer_num=3)
        table = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0], [8, 9, 10, 11, 4, 5, 99, 99]], dtype=torch.int32)
        self.runner = SimpleNamespace(
            token_to_kv_pool=self.pool, req_to_token_pool=SimpleNamespace(req_to_token=table), marker=None
        )
        self.batch = SimpleNamespace(
            out_cache_loc=torch.tensor([5, 0]),
            seq_lens_cpu=torch.tensor([6]),
            seq_lens=torch.tensor([6]),
            req_pool_indices=torch.tensor([1]),
        )

    def call(self, name, *args, original=lambda *args, **kwargs: None, **kwargs):
        row = next(row for row in SGLANG_ADAPTERS if row.target.endswith(name) and (0, 5, 23) in row.versions)
        return around(self.session, row)(original, *args, **kwargs)

    def hook(self, cls, name, row):
        """The hook of ``row`` on a class, as SGLang's registry puts it there."""
        original, hook = getattr(cls, name), around(self.session, row)

        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            return hook(original, *args, **kwargs)

        setattr(cls, name, wrapper)
        return hook

    def records(self, *kinds):
        self.session.recorder.resolve()
        self.session.close()
        assert self.session.counters.errors == {}
        return [record for record in read_ring(self.session.ring.path) if isinstance(record, kinds)]


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("HICACHE_OBS_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("HICACHE_OBS_RING_SLOTS", "256")
    monkeypatch.setenv("HICACHE_OBS_ARENA_IDS", "1024")
    return Server
