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

_NODE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_Z85_CHARS = 40
_NEXT = "@next"


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
    """The daemon's key pair: that in the file ``given``, else the folder's; made if it is not there yet, never overwritten.

    The public key lies in the folder afterwards, from where it is carried to nodes. A folder that cannot be written to is
    fine where nothing is missing.
    """
    pair = load_pair(given) if given is not None else _load_or_make(server_secret_path(keys))
    public = server_public_path(keys)
    if not public.exists() or load_public(public) != pair.public:
        _write(public, pair, secret=False)
    return pair


def has_server_keys(keys: Path) -> bool:
    """Whether the daemon has a pair already: its public key is there, the secret one may be kept elsewhere."""
    return server_public_path(keys).exists()


def make_node_keys(keys: Path, node: str) -> KeyPair:
    """The key pair of ``node`` and its place in the allow-list; made if not there, never overwritten."""
    pair = _load_or_make(node_secret_path(keys, node))
    _write(authorized_path(keys, node), pair, secret=False)
    return pair


def rotate_node_keys(keys: Path, node: str) -> KeyPair:
    """A new key pair for ``node``, whose present one stays allowed until ``retire_node_key``. Raises KeyFileError."""
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
    following.replace(authorized_path(keys, node))


def _next_path(keys: Path, node: str) -> Path:
    return keys / "authorized" / f"{_checked(node)}{_NEXT}.key"


def job_secret(folder: Path) -> str:
    """The key (hex, 256 bits) from which transport secrets of jobs are derived; made once, in a 0600 file."""
    path = folder / "transport.secret"
    if not path.exists():
        _write_whole(path, f"{secrets.token_hex(32)}\n", 0o600)
    return path.read_text(encoding="ascii").strip()


def load_pair(path: Path) -> KeyPair:
    """The pair in a secret file. Raises KeyFileError."""
    public, secret = _load(path)
    if secret is None:
        raise KeyFileError(f"{path}: holds no secret key", "name the file that ends in .key_secret")
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
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise KeyFileError(f"{path}: no key file: {error}", "make keys with `oobleckctl keygen`") from error
    for key in (public, secret):
        if key is not None and len(key) != _Z85_CHARS:
            problem = f"{path}: a key has {_Z85_CHARS} characters, not {len(key)}"
            raise KeyFileError(
                problem, "the file is damaged: remove it, and make it anew with `oobleckctl keygen`"
            )
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
    _write_whole(path, "\n".join(lines) + "\n", 0o600 if secret else 0o644)


def _write_whole(path: Path, text: str, mode: int) -> None:
    """Whole or not at all: a program that starts meanwhile must not read half a key."""
    _make_folder(path.parent)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="ascii") as file:
        file.write(text)
    _give_away(part)
    part.replace(path)


def _make_folder(path: Path) -> None:
    if not path.exists():
        _make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        _give_away(path)


def _give_away(path: Path) -> None:
    """What root makes belongs to whom the folder belongs to: to the service, whose keys these are."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
