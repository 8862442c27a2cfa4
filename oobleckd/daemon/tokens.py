"""Tokens for the API on TCP: who has which, until when, and what it allows.

Owns the file ``tokens.toml`` of the key folder, a table for each token with its name. The token itself is in
no file of ours: only its SHA-256 is, so who reads the file can do nothing with it. Tokens are 256 random
bits, which need no slow hash.

Errors: TokenError (a ValueError) with ``hint``.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from oobleckd.host import anyfile
from oobleckd.host.durable import make_folder, write_whole

Role = Literal["read", "act"]
PREFIX = "oobleck_"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class TokenError(ValueError):
    """A token file, or a name, that cannot be used."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Token:
    """``digest``: SHA-256 of the token, hex. ``expires_at``: POSIX seconds."""

    name: str
    digest: str
    role: Role
    expires_at: float


def tokens_path(keys: Path) -> Path:
    """Where the tokens of a key folder are listed."""
    return keys / "tokens.toml"


def digest_of(token: str) -> str:
    """The SHA-256 of a token, in hex: what is kept of it."""
    # No slow hash: 256 random bits cannot be guessed, whatever a guess costs. (D-service-012)
    return hashlib.sha256(token.encode()).hexdigest()


def make_token(keys: Path, name: str, role: Role, expires_at: float) -> str:
    """A new token of ``name`` in place of any it had; returned once, kept as a digest. Raises TokenError,
    OSError.
    """
    if not _NAME.fullmatch(name):
        raise TokenError(
            f"{name!r} is no name for a token", "use small letters, digits, dots, dashes and underscores"
        )
    token = PREFIX + secrets.token_urlsafe(32)
    others = [each for each in load_tokens(keys) if each.name != name]
    _write(tokens_path(keys), [*others, Token(name, digest_of(token), role, expires_at)])
    return token


def drop_token(keys: Path, name: str) -> None:
    """No token of ``name`` any more. Raises TokenError, OSError."""
    known = load_tokens(keys)
    if name not in {each.name for each in known}:
        raise TokenError(f"no token is called {name!r}", f"{tokens_path(keys)} lists them")
    _write(tokens_path(keys), [each for each in known if each.name != name])


def load_tokens(keys: Path) -> tuple[Token, ...]:
    """All tokens of a key folder, by name. Raises TokenError."""
    path = tokens_path(keys)
    try:
        raw = anyfile.toml(path)
    except FileNotFoundError:
        return ()
    except anyfile.FileError as error:
        raise TokenError(
            f"{path}: {error}", "mend the line, or remove the file and make tokens anew"
        ) from error
    return tuple(_token(path, name, table) for name, table in sorted(raw.items()))


def find(tokens: Iterable[Token], token: str) -> Token | None:
    """The one that ``token`` is. All are compared, each in constant time."""
    digest = digest_of(token)
    found = [each for each in tokens if hmac.compare_digest(each.digest, digest)]
    return found[0] if found else None


def _token(path: Path, name: str, table: object) -> Token:
    match table:
        case {"sha256": str(digest), "role": str(role), "expires": dt.datetime() as expires}:
            if _SHA256.fullmatch(digest) and role in get_args(Role) and expires.tzinfo is not None:
                return Token(name, digest, role, expires.timestamp())  # type: ignore[arg-type]
    raise TokenError(
        f"{path}: [{name}] is no token", "remove the table, and make it anew with `oobleckctl token`"
    )


def _write(path: Path, tokens: Iterable[Token]) -> None:
    lines = ["# Made by `oobleckctl token`. Of a token only its SHA-256 is kept.", ""]
    for token in sorted(tokens, key=lambda each: each.name):
        expires = dt.datetime.fromtimestamp(token.expires_at, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        lines += [
            f'["{token.name}"]',
            f'sha256 = "{token.digest}"',
            f'role = "{token.role}"',
            f"expires = {expires}",
            "",
        ]
    make_folder(path.parent)
    write_whole(path, "\n".join(lines).encode(), 0o600, as_folder=True)
