"""CURVE key pairs as files, and the allow-list of nodes.

Owns the transport secret of the state folder, and the key folder::

    server.key          public key of the daemon, for every node
    server.key_secret   its secret (0600)
    nodes/<node>.key_secret   key pair of a node (0600), to be carried to that node and nowhere else
    authorized/<node>.key     public keys that may join, by the node they belong to
    authorized/<node>@next.key     the node'"'"'s next key, beside the present one while it is being changed

Files have the format of ``zmq.auth`` certificates, so ``zmq.auth.load_certificate`` reads them too. Who
may speak as which node follows from ``authorized/`` alone: the key names the node.

Errors: KeyFileError (a ValueError) with ``hint``.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

from oobleckd.host.durable import make_folder, move, write_whole
from oobleckd.protocol.z85 import why_none

_NODE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_NEXT = "@next"
_SECRET_BYTES = 32
_SECRET = re.compile(r"[0-9a-f]{64}")
_DAMAGED = "the file is damaged: remove it, and make it anew with `oobleckctl keygen`"


class KeyFileError(ValueError):
    """A key file that is missing, unreadable or of somebody else's making."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Public and secret key, both z85 text of 40 characters as bytes."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.decode()!r})"


def server_public_path(keys: Path) -> Path:
    """Where the daemon's public key lies."""
    return keys / "server.key"


def server_secret_path(keys: Path) -> Path:
    """Where the daemon's key pair lies."""
    return keys / "server.key_secret"


def node_secret_path(keys: Path, node: str) -> Path:
    """Where the key pair of ``node`` lies. Raises KeyFileError for a name that is none."""
    return keys / "nodes" / f"{_checked(node)}.key_secret"


def authorized_path(keys: Path, node: str) -> Path:
    """Where the public key by which ``node`` may join lies."""
    return keys / "authorized" / f"{_checked(node)}.key"


def make_server_keys(keys: Path, given: Path | None = None) -> KeyPair:
    """The daemon's key pair: that in the file ``given``, else the folder's; made if it is not there yet,
    never overwritten.

    The public key lies in the folder afterwards, from where it is carried to nodes. A folder that cannot be
    written to is fine where nothing is missing.
    """
    pair = load_pair(given) if given is not None else _load_or_make(server_secret_path(keys))
    public = server_public_path(keys)
    if not public.exists() or load_public(public) != pair.public:
        _write(public, pair, secret=False)
    return pair


def has_server_keys(keys: Path) -> bool:
    """Whether the daemon has a pair already: its public key is there, the secret one may be kept
    elsewhere.
    """
    return server_public_path(keys).exists()


def make_node_keys(keys: Path, node: str) -> KeyPair:
    """The key pair of ``node`` and its place in the allow-list; made if not there, never overwritten."""
    pair = _load_or_make(node_secret_path(keys, node))
    _write(authorized_path(keys, node), pair, secret=False)
    return pair


def rotate_node_keys(keys: Path, node: str) -> KeyPair:
    """A new key pair for ``node``, whose present one stays allowed until ``retire_node_key``. Raises
    KeyFileError.
    """
    secret = node_secret_path(keys, node)
    if not authorized_path(keys, node).exists():
        raise KeyFileError(
            f"{node} has no key that could be changed", f"make one with `oobleckctl keygen {node}`"
        )
    if _next_path(keys, node).exists():
        raise KeyFileError(
            f"{node} is changing its key already", f"end that first: `oobleckctl keygen --retire {node}`"
        )
    pair = KeyPair(*zmq.curve_keypair())
    _write(_next_path(keys, node), pair, secret=False)
    _write(secret, pair, secret=True)
    return pair


def retire_node_key(keys: Path, node: str) -> None:
    """The key that ``node`` had before ``rotate_node_keys`` lets nobody in any more. Raises KeyFileError."""
    following = _next_path(keys, node)
    if not following.exists():
        raise KeyFileError(
            f"{node} is not changing its key", f"begin with `oobleckctl keygen --rotate {node}`"
        )
    move(following, authorized_path(keys, node))


def _next_path(keys: Path, node: str) -> Path:
    return keys / "authorized" / f"{_checked(node)}{_NEXT}.key"


def job_secret(folder: Path) -> str:
    """The key (hex, 256 bits) from which transport secrets of jobs are derived; made once, in a 0600 file.
    Raises KeyFileError where the file holds none: from less than 256 bits anybody could compute them.
    """
    path = secret_path(folder)
    if not os.path.lexists(path):
        make_folder(path.parent)
        write_whole(path, f"{secrets.token_hex(_SECRET_BYTES)}\n".encode("ascii"), 0o600, as_folder=True)
    hint = f"remove it: the daemon makes a new one at its start, and links are made anew with it (rm {path})"
    try:
        text = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path}: holds no secret, but other bytes", hint) from error
    except OSError as error:
        hint = "it must be a file that the daemon's user can read"
        raise KeyFileError(f"{path}: cannot be read: {error.strerror}", hint) from error
    if not _SECRET.fullmatch(text):
        found = f"{len(text)} characters" if text else "nothing"
        raise KeyFileError(f"{path}: holds no secret of {8 * _SECRET_BYTES} bits, but {found}", hint)
    return text


def secret_path(folder: Path) -> Path:
    """Where a state folder keeps the key of ``job_secret``."""
    return folder / "transport.secret"


def load_pair(path: Path) -> KeyPair:
    """The pair in a secret file. Raises KeyFileError."""
    public, secret = _load(path)
    if secret is None:
        raise KeyFileError(f"{path}: holds no secret key", "name the file that ends in .key_secret")
    try:
        belongs = zmq.curve_public(secret) == public
    except (zmq.ZMQError, ValueError):
        belongs = False
    if not belongs:
        problem = f"{path}: its secret key is not that of its public key"
        raise KeyFileError(problem, _DAMAGED)
    return KeyPair(public, secret)


def load_public(path: Path) -> bytes:
    """The public key in a file of either kind. Raises KeyFileError."""
    return _load(path)[0]


def load_authorized(keys: Path) -> dict[str, str]:
    """Public key (z85 text) -> node name, of everything in ``authorized/``.

    Raises KeyFileError when a file is damaged or two nodes share a key.
    """
    allowed: dict[str, str] = {}
    for path in sorted((keys / "authorized").glob("*.key")):
        node, public = _checked(path.stem.removesuffix(_NEXT)), load_public(path).decode()
        if public in allowed:
            raise KeyFileError(
                f"{path}: {allowed[public]} has the same key",
                f"a key names one node: make another with `oobleckctl keygen {node}`",
            )
        allowed[public] = node
    return allowed


def _checked(node: str) -> str:
    if not _NODE.fullmatch(node):
        raise KeyFileError(
            f"{node!r} is no name for a node", "use small letters, digits, dots, dashes and underscores"
        )
    return node


def _load(path: Path) -> tuple[bytes, bytes | None]:
    if not path.exists():
        raise KeyFileError(f"{path}: no such key", "make keys with `oobleckctl keygen`")
    try:
        if not path.stat().st_size:
            raise KeyFileError(f"{path}: no key file: it is empty", _DAMAGED)
        public, secret = zmq.auth.load_certificate(path)
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path}: no key file: it is no text", _DAMAGED) from error
    except OSError as error:
        raise KeyFileError(
            f"{path}: cannot be read: {error.strerror}", "it is for the daemon's user"
        ) from error
    except ValueError as error:
        raise KeyFileError(f"{path}: no key file: {error}", _DAMAGED) from error
    for key in (public, secret):
        if key is not None and (problem := why_none(key)):
            raise KeyFileError(f"{path}: {problem}", _DAMAGED)
    return public, secret


def _load_or_make(path: Path) -> KeyPair:
    if path.exists():
        return load_pair(path)
    pair = KeyPair(*zmq.curve_keypair())
    _write(path, pair, secret=True)
    return pair


def _write(path: Path, pair: KeyPair, *, secret: bool) -> None:
    lines = ["metadata", "curve", f'    public-key = "{pair.public.decode()}"']
    if secret:
        lines.append(f'    secret-key = "{pair.secret.decode()}"')
    make_folder(path.parent)
    write_whole(path, ("\n".join(lines) + "\n").encode("ascii"), 0o600 if secret else 0o644, as_folder=True)
