"""A malformed peer on every way into a running agent: its port with and without TLS and credentials, its lock file, the
rings of other ranks, and the journal of a ring that it takes over. Each is refused, and changes nothing.

``make fuzz-endpoints N=10000`` sends more. A failure prints the seed that repeats it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import ssl
from base64 import b64encode

import pytest

from hicache_obs.agent import NodeAgent, NodeOptions
from hicache_obs.exporters.credentials import read_certificate, read_credentials
from hicache_obs.exporters.endpoint import serve
from hicache_obs.exporters.prometheus import Metrics, render
from hicache_obs.recorder.agent_lock import FILE_NAME, running_agent

INPUTS = int(os.environ.get("HICACHE_OBS_FUZZ_ENDPOINTS", "100"))
REFUSALS = {400, 401, 404, 405, 408, 431}
TOKEN, USER = b"s3cret", b"ann:pass"
MOVING = ("overhead", "timestamp", "oldest_pending", "_created")
"""Series that time alone changes."""
WORDS = (0, 1, 2, 7, 255, 2**15, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
PATHS = (b"/metrics", b"/", b"/-/healthy", b"/docs/metrics", b"/none", b"/../metrics", b"/metrics?name[]=up", b"*", b"")
METHODS = (*[b"GET"] * 12, b"HEAD", b"POST", b"PUT", b"CONNECT", b"get", b"", b"GET GET", b"\x00", b"PRI")
VERSIONS = (*[b"HTTP/1.1"] * 8, b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.", b"", b"HTTP/1.1 x")
HEADERS = (
    b"Host: x",
    b"Accept: application/openmetrics-text",
    b"Accept: " + b"text/plain;q=0.5," * 50,
    b"Accept-Encoding: gzip;q=a",
    b"Content-Length: 99999999999999",
    b"Content-Length: -1",
    b"Transfer-Encoding: chunked",
    b"Expect: 100-continue",
    b"Upgrade: websocket",
    b"Host : x",
    b": x",
    b"no colon",
    b" folded",
    b"X: \x00\xff",
    b"X: " + b"y" * 5000,
    b"X: " + b"y" * 20_000,
)
AUTHORIZATIONS = (
    b"Bearer " + TOKEN,
    b"Bearer " + TOKEN + b"x",
    b"Bearer",
    b"bearer  ",
    b"Basic " + b64encode(USER),
    b"Basic " + b64encode(USER)[:-3],
    b"Basic " + b64encode(b"ann"),
    b"Basic " + b64encode(b"\xff\xfe:\x00"),
    b"Basic =====",
    b"Digest x",
    b"\xff" * 40,
)


def mutated(rng, data):
    """Some bytes flipped, cut, doubled, put in, or overwritten."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not changed:
            break
        at, action = rng.randrange(len(changed)), rng.randrange(6)
        if action == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            del changed[at:]
        elif action == 2:
            del changed[at : at + rng.choice((1, 8, 64))]
        elif action == 3:
            changed[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
        elif action == 4:
            changed[at : at + 8] = changed[: rng.choice((1, 8))]
        else:
            place = at - at % 8
            changed[place : place + 8] = (rng.choice(WORDS) % 2**64).to_bytes(8, "little")
    return bytes(changed)


def request(rng):
    """A request that may be one, or nearly one."""
    lines = [b" ".join((rng.choice(METHODS), rng.choice(PATHS), rng.choice(VERSIONS)))]
    lines += rng.sample(HEADERS, rng.choice((0, 0, 0, 1, 2, 4)))
    if rng.random() < 0.4:
        lines.append(b"Authorization: " + rng.choice(AUTHORIZATIONS))
    data = b"\r\n".join([*lines, b"", b""])
    return rng.choice((data, data, mutated(rng, data), rng.randbytes(rng.randrange(200)), b"\n".join([*lines, b"\n"])))


class Node:
    """An agent with one good rank, its journal, and three ports: open, with credentials, and with TLS."""

    def __init__(self, rings, journals, stack, certificate, folder):
        self.rings, self.journals, self.certificate = rings, journals, certificate
        self.metrics = Metrics(ranks=())
        self.agent = NodeAgent(NodeOptions(rings, journals=journals, scraped=True), self.metrics)
        stack.callback(self.agent.close)
        token, users = folder / "token", folder / "users"
        for path, text in ((token, TOKEN), (users, USER)):
            path.touch(mode=0o600)
            path.write_bytes(text + b"\n")
        options = {"port": 0, "board": self.agent.board, "scraped": self.agent.scraped, "healthy": self.agent.stuck}
        self.open, self.guarded, self.tls = (
            stack.enter_context(serve(self.metrics, **options, **more))
            for more in (
                {},
                {"credentials": read_credentials(token, users)},
                {"tls": read_certificate(*certificate)},
            )
        )

    def state(self, tp):
        """All that is known of rank ``tp``, but for what time alone changes."""
        label = f'tp_rank="{tp}"'
        lines = render(self.metrics).decode().splitlines()
        return [line for line in lines if label in line and not any(word in line for word in MOVING)]

    def kept(self):
        """The good rank's journal."""
        return {path.name: path.read_bytes() for path in self.journals.glob("*tp0*/*.arrows")}


def talk(port, data, context=None):
    """Everything a port says to ``data``."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        connection = plain if context is None else context.wrap_socket(plain, server_hostname="localhost")
        with connection:
            connection.sendall(data)
            if context is None:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                answer += part
    return answer


def check_answer(answer, sent, *, guarded=False):
    """Nothing, a page, or a refusal; a page behind credentials only for who has them."""
    if not answer:
        return 0
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    status = int(answer.split(b" ", 2)[1])
    assert status in REFUSALS | {200, 503}, answer[:200]
    if guarded and status == 200 and b"/-/" not in sent:
        assert TOKEN in sent or b64encode(USER) in sent, sent
    assert TOKEN not in answer
    return status


def fuzz_port(rng, node, _make):
    sent = request(rng)
    return check_answer(talk(node.open.port, sent), sent)


def fuzz_credentials(rng, node, _make):
    sent = request(rng)
    return check_answer(talk(node.guarded.port, sent), sent, guarded=True)


def fuzz_tls(rng, node, _make):
    hello = b"\x16\x03\x01\x00\x2f\x01\x00\x00\x2b\x03\x03" + bytes(36) + b"\x00\x02\x13\x01\x01\x00"
    if rng.random() < 0.5:
        answer = talk(node.tls.port, rng.choice((hello, mutated(rng, hello), request(rng), b"")))
        assert not answer.startswith(b"HTTP"), "an answer in clear text"
        return 400
    sent = request(rng)
    return check_answer(talk(node.tls.port, sent, ssl.create_default_context(cafile=node.certificate[0])), sent)


def fuzz_lock(rng, node, _make):
    """Whoever may write to the directory is the agent's own user; what the lock says is still only words."""
    path = node.rings / FILE_NAME
    before = path.read_bytes()
    path.write_bytes(rng.choice((mutated(rng, before), rng.randbytes(50), b"[" * 4000, b'{"pid": 1}', b"")))
    facts = running_agent(node.rings)
    assert all(isinstance(value, str) for value in facts.values())
    assert "pid" in facts
    path.write_bytes(before)
    return 400


def fuzz_ring(rng, node, make):
    """A ring of rank 5, damaged before it is found, or while it is read."""
    path = make(5)
    whole = path.read_bytes()
    if rng.random() < 0.5:
        node.agent.cycle(budget_s=9)
    data = bytearray(whole)
    start = rng.choice((0, 0, 4096, rng.randrange(len(data))))
    stop = min(len(data), start + rng.choice((640, 4096)))
    data[start:stop] = mutated(rng, bytes(data[start:stop]))
    path.write_bytes(bytes(data))
    node.agent.cycle(budget_s=9, look=True)
    path.unlink(missing_ok=True)
    node.agent.cycle(budget_s=9, look=True)
    return 400


def fuzz_journal(rng, node, make):
    """The journal of rank 6 is damaged while no agent runs; then the ring is taken over."""
    path = make(6)
    node.agent.cycle(budget_s=9)
    folder = max(node.journals.glob(f"{path.stem}.*"))
    aside = node.journals.with_name("aside")
    aside.mkdir(mode=0o700, exist_ok=True)
    shutil.rmtree(aside / "j", ignore_errors=True)
    shutil.copytree(folder, aside / "j" / folder.name)
    rings = aside / "rings"
    shutil.rmtree(rings, ignore_errors=True)
    rings.mkdir(mode=0o700)
    shutil.copy(path, rings / path.name)
    victims = sorted((aside / "j" / folder.name).iterdir())
    victim = rng.choice(victims)
    data = victim.read_bytes()
    start = rng.choice((0, rng.randrange(max(1, len(data)))))
    victim.write_bytes(data[:start] + mutated(rng, data[start:]))
    other = NodeAgent(NodeOptions(rings, journals=aside / "j", scraped=True), Metrics(ranks=()))
    other.cycle(budget_s=9, look=True)
    assert other.blind == []
    other.close()
    path.unlink()
    node.agent.cycle(budget_s=9, look=True)
    return 400


WAYS = (
    *(fuzz_port, fuzz_port, fuzz_port, fuzz_credentials, fuzz_credentials, fuzz_tls),
    *(fuzz_lock, fuzz_ring, fuzz_ring, fuzz_journal),
)


@pytest.fixture
def node(rings, tmp_path, certificate):
    with contextlib.ExitStack() as stack:
        yield Node(rings, tmp_path / "j", stack, certificate, tmp_path)


def test_a_malformed_peer_is_refused_and_changes_nothing(node, rings, ring, round_of, fill, caplog):
    caplog.set_level("CRITICAL", "hicache_obs")
    good = ring(0, slots=512, arena_words=512)
    fill(good, *(round_of(n, times=True) for n in range(5)))
    node.agent.cycle(budget_s=9)

    def make(tp):
        writer = ring(tp)
        fill(writer, *(round_of(n, times=True) for n in range(8)))
        writer.disown()  # what happens to the file is none of its business
        return writer.path

    for tp in (5, 6):
        make(tp).unlink()
    before, kept = node.state(0), node.kept()
    assert any("violations_total" in line and line.endswith(" 5.0") for line in before)
    answers = []
    for seed in range(INPUTS):
        rng = random.Random(seed)
        way = WAYS[seed % len(WAYS)]
        try:
            answers.append(way(rng, node, make))
            assert node.state(0) == before
            assert node.kept() == kept
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {way.__name__}: {error!r}") from error
    assert answers.count(200) > INPUTS / 50
    assert sum(answer in REFUSALS for answer in answers) > INPUTS / 4
    fill(good, round_of(9, times=True))
    node.agent.cycle(budget_s=9)
    assert any("violations_total" in line and line.endswith(" 6.0") for line in node.state(0))
