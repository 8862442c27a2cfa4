"""msgpack in, structs out. Unknown tags are told apart from damage, so that they can be counted
and ignored.
"""

from __future__ import annotations

import msgspec

from oobleckd.protocol.messages import FromWorker, ToWorker
from oobleckd.protocol.text import all_visible
from oobleckd.protocol.unreadable import UNREADABLE, problem_of

_encoder = msgspec.msgpack.Encoder()
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_tag = msgspec.msgpack.Decoder(type=dict[str, msgspec.Raw])


class CodecError(ValueError):
    """Bytes that are no message. Tree: CodecError > UnknownTagError."""


class UnknownTagError(CodecError):
    """A well-formed message of a kind that this version does not know."""


def encode(message: msgspec.Struct) -> bytes:
    """Bytes of one message."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:  # the name of a file that is no UTF-8, in a sentence
        return _encoder.encode(all_visible(message))


def decode_from_worker(data: bytes) -> FromWorker:
    """A message of an agent or device. Raises UnknownTagError or CodecError."""
    try:
        return _from_worker.decode(data)
    except UNREADABLE as error:
        raise _classify(data, error) from error


def decode_to_worker(data: bytes) -> ToWorker:
    """A message of the daemon. Raises UnknownTagError or CodecError."""
    try:
        return _to_worker.decode(data)
    except UNREADABLE as error:
        raise _classify(data, error) from error


def _classify(data: bytes, error: Exception) -> CodecError:
    if "Invalid value" in str(error) and "$.type" in str(error):
        try:
            tag = msgspec.msgpack.decode(_tag.decode(data)["type"])
        except (*UNREADABLE, KeyError):
            return CodecError(problem_of(error))
        return UnknownTagError(f"unknown message {tag!r}")
    return CodecError(problem_of(error))
