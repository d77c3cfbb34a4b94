"""The pages of one port: metrics, the status page, what the metrics mean, and the two probes."""

from __future__ import annotations

import base64
import hashlib
import ssl
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

from hicache_obs.exporters.accepted import Accepted
from hicache_obs.exporters.credentials import Credentials
from hicache_obs.exporters.findings_board import FindingsBoard
from hicache_obs.exporters.health import read_health
from hicache_obs.exporters.metrics_page import markdown
from hicache_obs.exporters.prometheus import Metrics, negotiate
from hicache_obs.exporters.server import LOOPBACK, Answer, Request, Server, listen, plain
from hicache_obs.exporters.status_page import DOCS, STYLE, status_page

HEALTHY: Final = "/-/healthy"
READY: Final = "/-/ready"
_PAGE_HEADERS: Final = {
    # The page runs no script and loads nothing; should text ever get in unescaped, it still cannot.
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    f"style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'",
    "Referrer-Policy": "no-referrer",
}


def serve(
    metrics: Metrics,
    *,
    board: FindingsBoard | None = None,
    accepted: Accepted | None = None,
    address: str = LOOPBACK,
    port: int,
    option: str = "--serve",
    tls: ssl.SSLContext | None = None,
    credentials: Credentials | None = None,
    created: bool = True,
    facts: Mapping[str, str] | None = None,
    scraped: Callable[[], None] = lambda: None,
    healthy: Callable[[], str] = str,
    ready: Callable[[], str] = str,
) -> Server:
    """Serve metrics at ``/metrics`` and a status page at ``/`` from a daemon thread.

    Args:
        metrics: To expose.
        board: Findings for the status page.
        accepted: Marked as such there.
        address, port, option, tls, credentials: See ``listen``. The probes need no credentials.
        created: Expose created times in OpenMetrics.
        facts: Further lines of the status page's foot.
        scraped: Called before all metrics are read for an answer. On the server's thread.
        healthy, ready: What keeps this process from being so, in words; empty if nothing. On the server's thread.

    Raises:
        ConfigError: The address or port cannot be bound.
    """
    metrics.registry()  # without the library this fails here, and not at the first scrape
    shown = dict(facts or {})
    known = Accepted() if accepted is None else accepted

    def scrape(request: Request) -> Answer:
        accept, names = request.headers.get("accept", ""), request.query.get("name[]", ())
        if not names:
            scraped()
        body, kind = negotiate(metrics, accept, names=names, created=created)
        return Answer(body, kind)

    def status(request: Request) -> Answer:
        entries = board.entries() if board is not None else []
        text = status_page(
            read_health(metrics),
            entries,
            accepted=known,
            now_ns=time.time_ns(),
            facts=shown,
            reload="reload" in request.query,
        )
        return Answer(text.encode(), "text/html; charset=utf-8", headers=_PAGE_HEADERS)

    def probe(problem: Callable[[], str]) -> Callable[[Request], Answer]:
        def answer(_request: Request) -> Answer:
            text = problem()
            return plain(HTTPStatus.SERVICE_UNAVAILABLE if text else HTTPStatus.OK, text or "ok")

        return answer

    pages = {
        "/": status,
        "/metrics": scrape,
        DOCS: lambda _request: Answer(markdown().encode()),
        HEALTHY: probe(healthy),
        READY: probe(ready),
    }
    return listen(
        pages,
        address=address,
        port=port,
        option=option,
        tls=tls,
        credentials=credentials,
        public=frozenset({HEALTHY, READY}),
    )
