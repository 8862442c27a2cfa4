"""What devices say to each other about their groups: small frozen structs, each in a tensor message without
tensors.

A **channel** is one direction between two members of an epoch's group, named by (epoch, sender, receiver).
Who speaks is told by the link that it came over. "Sender" below is the channel's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch import Tensor

from oobleckd.protocol.unreadable import UNREADABLE, problem_of
from oobleckd.worker.transport import wire
from oobleckd.worker.transport.mailbox import Key

KEY: Key = ("~",)
"""The key of every tensor message that carries a group message."""


class GroupMessage(msgspec.Struct, frozen=True, tag=True):
    """Base: ``epoch`` names the group."""

    epoch: int


class Open(GroupMessage, frozen=True):
    """Sender: I open a channel to you. ``place`` is the accelerator that I am on."""

    place: str


class Stored(GroupMessage, frozen=True):
    """Either end: an entry of the channel's c10d store. ``ours``: the speaker is the channel's sender."""

    ours: bool
    key: str
    value: bytes


class Header(GroupMessage, frozen=True):
    """Sender: the next payload on the channel is that of tensor message ``number``, which is ``key`` and
    ``meta``.
    """

    number: int
    key: tuple[str | int, ...]
    meta: bytes
    dtypes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


class Arrived(GroupMessage, frozen=True):
    """Receiver: every payload up to tensor message ``number`` is here."""

    number: int


class Over(GroupMessage, frozen=True):
    """Sender: I have left the group, and wait for your ``Again``."""

    why: str


class Again(GroupMessage, frozen=True):
    """Receiver: I have left the group with every tensor message up to ``number``: send me the rest by the
    transport.
    """

    number: int
    why: str


class ChannelRefused(GroupMessage, frozen=True, tag="Refused"):
    """Receiver: there can be no channel between us two; the group goes on without it."""

    why: str


Any = Open | Stored | Header | Arrived | Over | Again | ChannelRefused

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Any)


def encode(message: Any) -> bytes:
    """A group message as the meta of a tensor message."""
    return _encoder.encode(message)


def decode(data: bytes) -> Any:
    """The inverse. Raises WireError."""
    try:
        message: Any = _decoder.decode(data)
    except UNREADABLE as error:
        raise wire.WireError(f"no group message: {problem_of(error)}") from error
    return message


def header(epoch: int, number: int, key: Key, meta: bytes, tensors: Sequence[Tensor]) -> Header:
    """The header of a tensor message. Raises WireError for a dtype without a number on the wire."""
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    return Header(epoch, number, key, meta, wire.numbers_of(tensors), shapes)
