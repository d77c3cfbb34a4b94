"""The HTTP server: what it answers, whom it lets in, and that a slow or large client costs nobody else anything."""

from __future__ import annotations

import gzip
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http import HTTPStatus
from pathlib import Path

import pytest

from hicache_obs.errors import ConfigError
from hicache_obs.exporters import server as module
from hicache_obs.exporters.credentials import Credentials, read_certificate, read_credentials
from hicache_obs.exporters.server import Answer, Request, Server, listen, plain

LARGE = b"x" * 5000


def broken(_request: Request) -> Answer:
    raise RuntimeError("no such luck")


PAGES = {
    "/a": lambda request: Answer(f"a {sorted(request.query.items())}".encode()),
    "/large": lambda _request: Answer(LARGE),
    "/open": lambda _request: plain(HTTPStatus.OK, "ok"),
    "/broken": broken,
}


@pytest.fixture
def running() -> Iterator[Callable[..., Server]]:
    """``running(**options)``: a server of ``PAGES``."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(listen(PAGES, port=0, public=frozenset({"/open"}), **options))


def talk(server: Server, sent: bytes, *, context: ssl.SSLContext | None = None) -> bytes:
    """Everything the server says to ``sent``."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    if context is not None:
        connection = context.wrap_socket(connection, server_hostname="localhost")
    with connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def ask(server: Server, path: str, *headers: str, method: str = "GET", context: ssl.SSLContext | None = None) -> bytes:
    head = "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""])
    return talk(server, head.encode(), context=context)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# -- what it answers -----------------------------------------------------------------------------------------


def test_an_answer_is_whole_and_says_its_length(running: Callable[..., Server]) -> None:
    head, _, body = ask(running(), "/a?x=1&x=2&y").partition(b"\r\n\r\n")

    assert body == b"a [('x', ['1', '2']), ('y', [''])]"
    assert head.decode().split("\r\n") == [
        "HTTP/1.1 200 OK",
        "Content-Type: text/plain; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
    ]


def test_head_is_get_without_body(running: Callable[..., Server]) -> None:
    server = running()
    head, _, _ = ask(server, "/a").partition(b"\r\n\r\n")

    assert ask(server, "/a", method="HEAD") == head + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "code", "text"),
    [
        (b"GET /b HTTP/1.1\r\n\r\n", 404, "no such page; there are /a /large /open /broken"),
        (b"GET /a/ HTTP/1.1\r\n\r\n", 404, "no such page; there are /a /large /open /broken"),
        (b"GET /../a HTTP/1.1\r\n\r\n", 404, "no such page; there are /a /large /open /broken"),
        (b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405, "use GET or HEAD"),
        (b"OPTIONS /a HTTP/1.1\r\n\r\n", 405, "use GET or HEAD"),
        (b"GET /broken HTTP/1.1\r\n\r\n", 500, "this page failed; the log says why"),
        (b"GET /a\r\n\r\n", 400, "not an HTTP/1 request"),
        (b"GET a HTTP/1.1\r\n\r\n", 400, "not an HTTP/1 request"),
        (b"GET /a HTTP/2\r\n\r\n", 400, "not an HTTP/1 request"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400, "not an HTTP/1 request"),
        (b"GET /a HTTP/1.1\r\nno colon\r\n\r\n", 400, "not an HTTP/1 request"),
        (b"GET /a HTTP/1.1\r\nHost : x\r\n\r\n", 400, "not an HTTP/1 request"),
        (b"GET /a?" + b"&".join([b"x=1"] * 65) + b" HTTP/1.1\r\n\r\n", 400, "not an HTTP/1 request"),
    ],
)
def test_what_it_refuses(running: Callable[..., Server], sent: bytes, code: int, text: str) -> None:
    head, _, body = talk(running(), sent).partition(b"\r\n\r\n")

    assert (status(head), body.decode()) == (code, f"{text}\n")
    assert (b"Allow: GET, HEAD" in head) == (code == 405)


def test_large_answers_are_packed_for_who_asks(running: Callable[..., Server]) -> None:
    server = running()
    head, _, body = ask(server, "/large", "Accept-Encoding: br, gzip;q=1").partition(b"\r\n\r\n")

    assert b"Content-Encoding: gzip" in head
    assert gzip.decompress(body) == LARGE
    assert ask(server, "/large").endswith(b"\r\n\r\n" + LARGE)
    assert b"Content-Encoding" not in ask(server, "/a", "Accept-Encoding: gzip")


def test_a_closed_server_has_given_its_port_and_its_thread_back(running: Callable[..., Server]) -> None:
    server = running()
    idle = socket.create_connection(("127.0.0.1", server.port))
    server.close()
    with idle, closing(socket.create_server(("127.0.0.1", server.port))):
        assert "hicache-obs-server" not in {thread.name for thread in threading.enumerate()}


# -- slow and large clients ----------------------------------------------------------------------------------


def test_a_large_head_is_cut_off(running: Callable[..., Server]) -> None:
    answer = talk(running(), b"GET /a HTTP/1.1\r\nX: " + b"y" * module.MAX_HEAD_BYTES + b"\r\n\r\n")

    assert status(answer) == 431


def test_a_request_in_drops_is_cut_off_and_nobody_waits_for_it(
    running: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEAD_S", 3.0)
    server = running()
    threads = threading.active_count()
    began = time.monotonic()
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(20)]
        for connection in slow:
            connection.sendall(b"GET /a HTTP/1.1\r\nX-Drop: ")
        assert status(ask(server, "/a")) == 200
        assert threading.active_count() == threads
        for connection in slow[:3]:
            connection.settimeout(30)
            assert status(connection.recv(4096)) == 408
    assert time.monotonic() - began >= 3


def test_the_oldest_connection_makes_room(running: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(module, "HEAD_S", 60.0)
    server = running()
    with ExitStack() as stack:
        slow = []
        for _ in range(5):
            slow.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30)))
            slow[-1].sendall(b"GET /a ")
        assert slow[0].recv(10) == b""  # gone
        slow[4].sendall(b"HTTP/1.1\r\n\r\n")
        assert status(slow[4].recv(4096)) == 200
        assert status(ask(server, "/a")) == 200


def test_a_client_that_does_not_read_is_cut_off(
    running: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    monkeypatch.setitem(PAGES, "/huge", lambda _request: Answer(bytes(64 << 20)))
    server = running()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as lazy:
        lazy.sendall(b"GET /huge HTTP/1.1\r\n\r\n")
        time.sleep(1.5)
        received = 0
        try:
            while chunk := lazy.recv(1 << 20):
                received += len(chunk)
        except ConnectionResetError:
            pass
        assert received < 64 << 20
    assert status(ask(server, "/a")) == 200


# -- who may read --------------------------------------------------------------------------------------------


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return {
        "token": written(tmp_path / "token", "s3cret\n"),
        "users": written(tmp_path / "users", "# people\nada:pass:word\n\ngrace:pässword\n"),
    }


def basic(text: str) -> str:
    return f"Authorization: Basic {b64encode(text.encode()).decode()}"


BEARER_ONLY = 'WWW-Authenticate: Bearer realm="hicache-obs"'
BASIC_ONLY = 'WWW-Authenticate: Basic realm="hicache-obs", charset="UTF-8"'
BOTH = 'WWW-Authenticate: Bearer realm="hicache-obs", Basic realm="hicache-obs", charset="UTF-8"'


@pytest.mark.parametrize(
    ("kinds", "header", "challenge"),
    [
        (["token"], "Authorization: Bearer s3cret", ""),
        (["token"], "authorization: bearer   s3cret ", ""),
        (["token"], "Authorization: Bearer s3cre", BEARER_ONLY),
        (["token"], "Authorization: Bearer ", BEARER_ONLY),
        (["token"], "Authorization: s3cret", BEARER_ONLY),
        (["token"], basic("ada:pass:word"), BEARER_ONLY),
        (["token"], "X-None: ", BEARER_ONLY),
        (["users"], basic("ada:pass:word"), ""),
        (["users"], basic("grace:pässword"), ""),
        (["users"], basic("ada:pässword"), BASIC_ONLY),
        (["users"], basic("ada"), BASIC_ONLY),
        (["users"], "Authorization: Basic !!!", BASIC_ONLY),
        (["users"], "Authorization: Bearer ada:pass:word", BASIC_ONLY),
        (["token", "users"], basic("ada:pass:word"), ""),
        (["token", "users"], "Authorization: Bearer s3cret", ""),
        (["token", "users"], "Authorization: Bearer nope", BOTH),
    ],
)
def test_who_is_let_in(
    running: Callable[..., Server], files: dict[str, Path], kinds: list[str], header: str, challenge: str
) -> None:
    chosen = {kind: files[kind] for kind in kinds}
    server = running(credentials=read_credentials(chosen.get("token"), chosen.get("users")))

    answer = ask(server, "/a", header)

    assert status(answer) == (401 if challenge else 200)
    assert [line for line in answer.decode().split("\r\n") if line.startswith("WWW")] == ([challenge] * bool(challenge))
    assert status(ask(server, "/open")) == 200
    assert status(ask(server, "/b")) == 401, "what exists is nobody's business"


def test_secrets_are_not_kept_in_clear(files: dict[str, Path]) -> None:
    kept = read_credentials(files["token"], files["users"])

    assert kept is not None
    assert "s3cret" not in repr(kept)
    assert "pass" not in repr(kept)


def test_without_files_everybody_may_read() -> None:
    assert read_credentials(None, None) is None
    assert read_certificate(None, None) is None


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("token", "", "--token-file {path}: expected one line with the token, without spaces"),
        ("token", "a\nb", "--token-file {path}: expected one line with the token, without spaces"),
        ("token", "a b", "--token-file {path}: expected one line with the token, without spaces"),
        ("users", "# none\n", "--basic-auth-file {path}: expected lines of user:password"),
        ("users", "ada:x\ngrace\n", "--basic-auth-file {path}, entry 2: expected lines of user:password"),
        ("users", ":x\n", "--basic-auth-file {path}, entry 1: expected lines of user:password"),
        ("users", "ada:\n", "--basic-auth-file {path}, entry 1: expected lines of user:password"),
        ("token", "x" * 70_000, "--token-file {path}: longer than 65536 bytes"),
    ],
)
def test_a_file_without_credentials_is_refused(tmp_path: Path, kind: str, text: str, message: str) -> None:
    path = written(tmp_path / kind, text)
    with pytest.raises(ConfigError) as caught:
        read_credentials(path if kind == "token" else None, path if kind == "users" else None)

    assert str(caught.value) == message.format(path=path)


def test_a_file_that_is_absent_or_binary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; name a file that this process may read"):
        read_credentials(tmp_path / "none", None)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        read_credentials(tmp_path / "binary", None)


def test_a_file_that_others_may_read_is_said(files: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    for mode in (0o600, 0o440):
        files["token"].chmod(mode)
        read_credentials(files["token"], None)
        assert caplog.messages == []
    files["token"].chmod(0o644)
    read_credentials(files["token"], None)
    said = f"--token-file {files['token']}: every user of this machine may read it; chmod 600 or 640 it"
    assert caplog.messages == [said]


def test_credentials_do_not_stop_at_the_first_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are compared in any case, so that time tells nothing."""
    compared: list[bytes] = []
    monkeypatch.setattr(
        "hicache_obs.exporters.credentials.hmac.compare_digest",
        lambda a, b: compared.append(b) or a == b,  # type: ignore[func-returns-value]
    )
    Credentials(b"t", (b"1", b"2", b"3")).refuse("Bearer t")

    assert compared == [b"t", b"1", b"2", b"3"]


# -- TLS -----------------------------------------------------------------------------------------------------


def test_tls_serves_who_trusts_the_certificate(running: Callable[..., Server], certificate: tuple[Path, Path]) -> None:
    server = running(tls=read_certificate(*certificate))

    assert server.url == f"https://127.0.0.1:{server.port}/metrics"
    assert status(ask(server, "/a", context=ssl.create_default_context(cafile=certificate[0]))) == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(server, "/a", context=ssl.create_default_context())


def test_clear_text_and_old_tls_get_nothing(running: Callable[..., Server], certificate: tuple[Path, Path]) -> None:
    server = running(tls=read_certificate(*certificate))
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        ask(server, "/a", context=old)
    try:
        said = ask(server, "/a")
    except ConnectionResetError:
        said = b""
    assert b"HTTP" not in said


def test_a_handshake_that_never_comes_keeps_nobody_waiting(
    running: Callable[..., Server], certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEAD_S", 2.0)
    server = running(tls=read_certificate(*certificate))
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as silent:
        assert status(ask(server, "/a", context=ssl.create_default_context(cafile=certificate[0]))) == 200
        assert silent.recv(10) == b""


def test_a_certificate_needs_its_key(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    for given, text in (
        ((cert, None), f"--tls-cert {cert}: needs --tls-key as well"),
        ((None, key), f"--tls-key {key}: needs --tls-cert as well"),
        ((key, cert), f"--tls-cert {key}, --tls-key {cert}: "),
        (
            (tmp_path / "none", key),
            f"--tls-cert {tmp_path / 'none'}, --tls-key {key}: No such file or directory; expected",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            read_certificate(*given)
        assert str(caught.value).startswith(text)
