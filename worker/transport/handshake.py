"""Who is at the other end of a transport link: a challenge and a proof from each side.

Owns the handshake. Both ends know the secret of the job (it came over the CURVE link of their agents)
and show it with HMAC-SHA256 over a transcript with both nonces, both names and the protocol version.
After that the stream is as it is, neither encrypted nor authenticated byte by byte: the network between
nodes is trusted to that degree.

The connecting end speaks first::

    connector                                acceptor
    hello(version, names, incarnation, key, nonce) ->
                                         <-  answer(nonce, proof) or answer(refused)
    proof                                ->
                                         <-  accepted
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec

from oobleckd.protocol.messages import PROTOCOL
from oobleckd.protocol.unreadable import UNREADABLE, problem_of
from oobleckd.protocol.versions import OLDEST, spoken, words
from oobleckd.worker.runtime.framing import FrameError, read_frame, write_frame

_LIMIT_BYTES = 4096
_NONCE_BYTES = 32
_ACCEPTED = b"accepted"
_T = TypeVar("_T")


class HandshakeError(ConnectionError):
    """The other end did not prove that it knows the secret, or did not accept that we do."""


class NotYet(HandshakeError):
    """The other end is alive and does not know the secret, perhaps not yet: ask again."""


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """First words: ``source`` in its ``incarnation`` wants to reach ``target``, with the secret called
    ``key``. It speaks ``oldest`` to ``version``.
    """

    version: int
    source: str
    incarnation: str
    target: str
    key: bytes
    nonce: bytes
    oldest: int = 0


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    nonce: bytes = b""
    proof: bytes = b""
    refused: str = ""
    not_yet: bool = False
    borrows: bool = False


def key_name(secret: bytes) -> bytes:
    """A public name of ``secret``, so that an acceptor knows which one is meant (256-bit secrets only)."""
    return hashlib.sha256(b"oobleck transport key\0" + secret).digest()[:8]


def connect(sock: socket.socket, *, source: str, incarnation: str, target: str, secret: bytes) -> bool:
    """The connecting side; whether the other one can read messages in memory that is lent to it. Raises
    HandshakeError, or OSError when the stream breaks.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    greeting = Greeting(PROTOCOL, source, incarnation, target, key_name(secret), nonce, OLDEST)
    hello = msgspec.msgpack.encode(greeting)
    write_frame(sock, hello)
    answer = _decode(_read(sock), _Answer)
    if answer.refused:
        raise (NotYet if answer.not_yet else HandshakeError)(f"{target} refused: {answer.refused}")
    expected = _proof(secret, b"acceptor", hello, answer.nonce)
    if not hmac.compare_digest(answer.proof, expected):
        raise HandshakeError(f"{target} does not know the secret of this job")
    write_frame(sock, _proof(secret, b"connector", hello, answer.nonce))
    if _read(sock) != _ACCEPTED:
        raise HandshakeError(f"{target} did not accept the proof")
    return answer.borrows


def accept(sock: socket.socket, *, device: str, find_secret: Callable[[Greeting], bytes | None]) -> Greeting:
    """The accepting side: who connected. Raises HandshakeError, or OSError when the stream breaks.

    ``find_secret`` gives the secret that the greeting names, or None to refuse; it may wait for it, as a
    peer can be told a new secret a little earlier than we are.
    """
    hello = _read(sock)
    greeting = _decode(hello, Greeting)
    if spoken(greeting.version, greeting.oldest) is None:
        theirs = words(greeting.version, greeting.oldest)
        _refuse(sock, f"it speaks protocol {words(PROTOCOL, OLDEST)} and you speak {theirs}")
    if greeting.target != device:
        _refuse(sock, f"this is {device}, not {greeting.target}")
    secret = find_secret(greeting)
    if secret is None:
        _refuse(sock, "it does not know the secret that you mean", not_yet=True)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    # Said, and not followed from a version: one of before answers without a word of it.
    answer = _Answer(nonce, _proof(secret, b"acceptor", hello, nonce), borrows=sock.family == socket.AF_UNIX)
    write_frame(sock, msgspec.msgpack.encode(answer))
    if not hmac.compare_digest(_read(sock), _proof(secret, b"connector", hello, nonce)):
        raise HandshakeError(f"someone who calls itself {greeting.source} does not know the secret")
    write_frame(sock, _ACCEPTED)
    return greeting


def _proof(secret: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    # The role keeps an end from being shown its own proof; the hello holds names, version and the other
    # nonce.
    return hmac.digest(secret, role + hashlib.sha256(hello).digest() + nonce, "sha256")


def _read(sock: socket.socket) -> bytes:
    try:
        data = read_frame(sock, _LIMIT_BYTES)
    except (FrameError, EOFError) as error:
        raise HandshakeError(f"no handshake: {error}") from error
    if data is None:
        raise HandshakeError("the other end closed during the handshake")
    return data


def _decode(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as error:
        raise HandshakeError(f"no handshake: {problem_of(error)}") from error


def _refuse(sock: socket.socket, why: str, *, not_yet: bool = False) -> NoReturn:
    write_frame(sock, msgspec.msgpack.encode(_Answer(refused=why, not_yet=not_yet)))
    raise HandshakeError(why)
