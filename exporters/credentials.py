"""Who may read the pages: a bearer token or user names with passwords, from files; and the server's certificate."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache_obs.errors import ConfigError

LOG: Final = logging.getLogger("hicache_obs.server")
REALM: Final = "hicache-obs"
MAX_FILE_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client must know: the token, or one of the ``user:password`` pairs. Kept as SHA-256 digests.

    Attributes:
        token: Of the bearer token, ``None`` if none is accepted.
        users: Of each pair.
    """

    token: bytes | None = None
    users: tuple[bytes, ...] = ()

    def refuse(self, authorization: str) -> tuple[str, ...]:
        """The challenges for a client that sent ``authorization``; none if it may read. Takes the same time always."""
        scheme, _, given = authorization.partition(" ")
        bearer = _digest(given.strip().encode("latin-1")) if scheme.lower() == "bearer" else b""
        basic = _digest(_decode(given)) if scheme.lower() == "basic" else b""
        accepted = [hmac.compare_digest(bearer, self.token)] if self.token is not None else []
        accepted += [hmac.compare_digest(basic, user) for user in self.users]
        if any(accepted):
            return ()
        challenges = [f'Bearer realm="{REALM}"'] if self.token is not None else []
        return (*challenges, *([f'Basic realm="{REALM}", charset="UTF-8"'] if self.users else ()))


def read_credentials(token_file: Path | None, users_file: Path | None) -> Credentials | None:
    """What the two files hold; ``None`` without files.

    Args:
        token_file: One line, the token.
        users_file: Lines of ``user:password``; empty lines and lines that begin with ``#`` are skipped.

    Raises:
        ConfigError: A file cannot be read, or holds no credential.
    """
    token = None
    if token_file is not None:
        (line, *more) = _read_lines("--token-file", token_file) or [""]
        if not line or more or len(line.split()) != 1:
            raise ConfigError(f"--token-file {token_file}: expected one line with the token, without spaces")
        token = _digest(line.encode())
    users = []
    if users_file is not None:
        users = [line for line in _read_lines("--basic-auth-file", users_file) if not line.startswith("#")]
        bad = [number for number, line in enumerate(users, 1) if not all(line.partition(":"))]
        if bad or not users:
            where = f", entry {bad[0]}" if bad else ""
            raise ConfigError(f"--basic-auth-file {users_file}{where}: expected lines of user:password")
    if token is None and not users:
        return None
    return Credentials(token, tuple(_digest(user.encode()) for user in users))


def read_certificate(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The server's side of TLS 1.2 and later; ``None`` without files. Read once: restart after a renewal.

    Raises:
        ConfigError: One file is missing, or they are no certificate with its key in PEM.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, absent = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{given} {certificate or key}: needs {absent} as well")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # never ask on the terminal
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"--tls-cert {certificate}, --tls-key {key}: {reason}; expected a certificate and its unencrypted key, PEM"
        ) from None
    return context


def _read_lines(option: str, path: Path) -> list[str]:
    try:
        if path.stat().st_mode & 0o007:  # a group may: mounted secrets belong to root and the group of the pod
            LOG.warning("%s %s: every user of this machine may read it; chmod 600 or 640 it", option, path)
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"{option} {path}: longer than {MAX_FILE_BYTES} bytes")
        return [line.strip() for line in text.decode().splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise ConfigError(f"{option} {path}: not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}; name a file that this process may read") from None


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        return b""
