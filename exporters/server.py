"""A small HTTP server for pages that are computed on request: one thread, bounded connections, deadlines everywhere.

``http.server`` and what builds on it give a slow client a thread for as long as it likes. Here one event loop reads
all requests; who does not finish in time, or sends too much, is cut off, and the oldest connection makes room.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import ipaddress
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import Final
from urllib.parse import parse_qs

from hicache_obs.errors import ConfigError
from hicache_obs.exporters.credentials import Credentials

LOG: Final = logging.getLogger("hicache_obs.server")
LOOPBACK: Final = "127.0.0.1"
MAX_HEAD_BYTES: Final = 16 << 10
MAX_CONNECTIONS: Final = 64
HEAD_S: Final = 5.0
"""For the TLS handshake, and again for the request's head."""
ANSWER_S: Final = 10.0
"""For a client to take the answer."""
_LINGER_S: Final = 0.5
"""For a client to stop sending: an answer is lost if the connection is closed on top of unread bytes."""
_GZIP_FROM_BYTES: Final = 1024
_LOST: Final = (OSError, EOFError, asyncio.TimeoutError, ssl.SSLError)
_TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Request:
    """A request as a page sees it.

    Attributes:
        path: Before the question mark, as it was sent.
        query: Values by name.
        headers: By lower-case name; the last of several.
    """

    path: str
    query: Mapping[str, list[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a page gives back."""

    body: bytes
    content_type: str = _TEXT
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


Page = Callable[[Request], Answer]
"""Called on the server's thread; nothing else is served meanwhile."""


def plain(status: HTTPStatus, text: str, **headers: str) -> Answer:
    """A line of text."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(f"{text}\n".encode(), status=status, headers=named)


class Server:
    """A running server, made by ``listen``; ends with ``close`` or the ``with`` block.

    Attributes:
        address, port: Where it listens.
        exposed: Whether other machines may reach it.
    """

    def __init__(self, address: str, listener: socket.socket, loop: _Loop) -> None:
        self.address: Final = address
        self.port: Final[int] = listener.getsockname()[1]
        self.exposed: Final = not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
        self._scheme = loop.scheme
        self._loop: _Loop | None = loop
        self._thread = threading.Thread(target=loop.run, name="hicache-obs-server", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address to scrape."""
        return f"{self.home}metrics"

    @property
    def home(self) -> str:
        """Address of the first page."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self._scheme}://{host}:{self.port}/"

    def close(self) -> None:
        """Stop listening; blocks until the thread ended. A second call does nothing."""
        if self._loop is not None:
            self._loop.stop()
            self._thread.join()
            self._loop = None

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def listen(
    pages: Mapping[str, Page],
    *,
    address: str = LOOPBACK,
    port: int,
    option: str = "--serve",
    tls: ssl.SSLContext | None = None,
    credentials: Credentials | None = None,
    public: frozenset[str] = frozenset(),
) -> Server:
    """Serve ``pages`` by path from a daemon thread.

    Args:
        pages: By path; other paths are 404.
        address: Local address to bind to.
        port: Port, 0 for any free one.
        option: What the user set the port with, for messages.
        tls: Speak TLS only.
        credentials: What a client must know; ``None``: nothing.
        public: Paths that need no credentials.

    Returns:
        The server; its ``port`` is the real one.

    Raises:
        ConfigError: The address or port cannot be bound.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"{option}: port {port} is out of range; choose 1 to 65535, or 0 for any free port")
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(place[:2], family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise ConfigError(f"{option}: {_bind_problem(error, address, port)}") from error
    listener.setblocking(False)
    return Server(address, listener, _Loop(listener, pages, tls, credentials, public))


class _Loop:
    """The thread's work: accept, read a head, answer, close."""

    def __init__(
        self,
        listener: socket.socket,
        pages: Mapping[str, Page],
        tls: ssl.SSLContext | None,
        credentials: Credentials | None,
        public: frozenset[str],
    ) -> None:
        self.scheme: Final = "http" if tls is None else "https"
        self._listener = listener
        self._pages = pages
        self._tls = tls
        self._credentials = credentials
        self._public = public
        self._loop = asyncio.new_event_loop()
        self._connections: dict[asyncio.Task[None], None] = {}
        """In order of arrival."""

    def run(self) -> None:
        """Serve until ``stop``."""
        loop = self._loop
        loop.set_exception_handler(lambda _loop, context: LOG.debug("%s", context["message"]))
        self._begin()
        try:
            loop.run_forever()
        finally:
            loop.remove_reader(self._listener)
            loop.run_until_complete(self._finish())
            self._listener.close()
            loop.close()

    def stop(self) -> None:
        """End ``run``; from any thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _finish(self) -> None:
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):  # transports close their sockets some turns later, one more with TLS
            await asyncio.sleep(0)

    def _begin(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Take one waiting connection; the loop calls again while there are more."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            LOG.debug("cannot accept a connection: %s", error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(0.1, self._begin)  # out of file descriptors: some will be closed
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._serve(connection))
        self._connections[task] = None
        task.add_done_callback(partial(self._over, connection))

    def _over(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before it began."""
        self._connections.pop(task, None)
        connection.close()

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        reader = asyncio.StreamReader(limit=MAX_HEAD_BYTES, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=HEAD_S if self._tls else None
            )
        except _LOST:
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        try:
            await self._answer(reader, writer)
        except _LOST:
            pass  # the client went away, or is too slow
        finally:
            transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_S)
        except asyncio.LimitOverrunError:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            answer, bare = plain(status, f"a request has at most {MAX_HEAD_BYTES} bytes"), False
        except asyncio.TimeoutError:
            answer, bare = plain(HTTPStatus.REQUEST_TIMEOUT, f"no request within {HEAD_S:g} s"), False
        else:
            answer, bare = self.respond(head)
        writer.write(_encode(answer, bare=bare))
        await asyncio.wait_for(writer.drain(), ANSWER_S)
        if writer.can_write_eof():
            writer.write_eof()
        await asyncio.wait_for(_discard(reader), ANSWER_S)

    def respond(self, head: bytes) -> tuple[Answer, bool]:
        """The answer to a request, and whether its body is left out."""
        parsed = _parse(head)
        if parsed is None:
            return plain(HTTPStatus.BAD_REQUEST, "not an HTTP/1 request"), False
        method, request = parsed
        bare = method == "HEAD"
        if self._credentials is not None and request.path not in self._public:
            challenges = self._credentials.refuse(request.headers.get("authorization", ""))
            if challenges:
                said = plain(HTTPStatus.UNAUTHORIZED, "credentials are needed", WWW_Authenticate=", ".join(challenges))
                return said, bare
        page = self._pages.get(request.path)
        if page is None:
            return plain(HTTPStatus.NOT_FOUND, f"no such page; there are {' '.join(self._pages)}"), bare
        if method not in ("GET", "HEAD"):
            return plain(HTTPStatus.METHOD_NOT_ALLOWED, "use GET or HEAD", Allow="GET, HEAD"), bare
        try:
            answer = page(request)
        except Exception:
            LOG.exception("page %s failed", request.path)
            return plain(HTTPStatus.INTERNAL_SERVER_ERROR, "this page failed; the log says why"), bare
        accepted = request.headers.get("accept-encoding", "")
        if len(answer.body) >= _GZIP_FROM_BYTES and any(c.split(";")[0].strip() == "gzip" for c in accepted.split(",")):
            packed = {**answer.headers, "Content-Encoding": "gzip"}
            answer = Answer(gzip.compress(answer.body, 1), answer.content_type, answer.status, packed)
        return answer, bare


async def _discard(reader: asyncio.StreamReader) -> None:
    """Read what the client still sends, until it stops."""
    while await asyncio.wait_for(reader.read(MAX_HEAD_BYTES), _LINGER_S):
        pass


def _parse(head: bytes) -> tuple[str, Request] | None:
    """Method and request of a head; ``None`` if it is none."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return None
    headers = {}
    for line in filter(None, lines):
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            return None
        headers[name.lower()] = value.strip()
    path, _, query = words[1].partition("?")
    try:
        values = parse_qs(query, keep_blank_values=True, max_num_fields=64)
    except ValueError:
        return None
    return words[0], Request(path, values, headers)


def _encode(answer: Answer, *, bare: bool) -> bytes:
    headers = {
        "Content-Type": answer.content_type,
        "Content-Length": str(len(answer.body)),
        "Connection": "close",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        **answer.headers,
    }
    lines = [f"HTTP/1.1 {answer.status.value} {answer.status.phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (b"" if bare else answer.body)


def _bind_problem(error: OSError, address: str, port: int) -> str:
    if isinstance(error, socket.gaierror):
        return f"address {address!r} cannot be resolved; give a local address such as {LOOPBACK} or 0.0.0.0"
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {address} is in use; choose another or 0 for any free port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"address {address} is not one of this machine; use {LOOPBACK} or 0.0.0.0"
    if error.errno == errno.EACCES:
        return f"port {port} on {address} needs privileges; choose one above 1023 or 0 for any free port"
    return f"cannot listen on port {port} of {address}: {error.strerror or error}"
