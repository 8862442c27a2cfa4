"""The durable state as bytes, and back: what a daemon that starts need not make of old entries.

A snapshot is read by the same version alone, or by one whose state has the same shape and comes of entries in
the same way; to any other it is None, and all entries are read. Owns no file: the journal keeps it.
"""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from typing import Any

import msgspec

from oobleckd.core.entries import Noted
from oobleckd.core.state import State
from oobleckd.protocol.unreadable import UNREADABLE

FOLD = 1
"""Another number when ``apply``, or ``as_shown`` before it, makes another state of the same entries."""


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    shape: bytes
    state: msgspec.Raw


def encode(state: State) -> bytes:
    """``state`` as it is now."""
    return _encoder.encode((shape(), state))


def decode(data: bytes) -> State | None:
    """The state in ``data``; None where that is no snapshot, or one of another shape."""
    try:
        found = _decoder.decode(data)
        return _state_decoder().decode(found.state) if found.shape == shape() else None
    except UNREADABLE:
        return None


@functools.cache
def shape() -> bytes:
    """Tells apart the states of two versions: a digest of all types in it."""
    # Of an older one a field that is missing would get its default, and that is not what the entries say of
    # it. (D-daemon-025)
    types, parts = msgspec.json.schema_components([State, Noted], schema_hook=_schema_of)
    said = msgspec.json.encode((FOLD, _named(State), types, _without_words(parts)))
    return hashlib.blake2b(said, digest_size=16).digest()


def _schema_of(kind: Any) -> dict[str, Any]:
    return {"title": repr(kind)}


def _without_words(schema: Any) -> Any:
    """``schema`` without docstrings."""
    if isinstance(schema, dict):
        return {
            key: _without_words(value)
            for key, value in schema.items()
            if key != "description" or not isinstance(value, str)
        }
    return list(map(_without_words, schema)) if isinstance(schema, list) else schema


def _named(kind: type) -> dict[str, tuple[str, ...]]:
    """The fields of all structs in ``kind``, in order: the schema of one that is an array has no names."""
    found: dict[str, tuple[str, ...]] = {}
    todo: list[Any] = [msgspec.inspect.type_info(kind)]
    while todo:
        each = todo.pop()
        if isinstance(each, tuple):
            todo += each
        elif isinstance(each, msgspec.inspect.Field):
            todo.append(each.type)
        elif isinstance(each, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
            name = f"{each.cls.__module__}.{each.cls.__qualname__}"
            if name not in found:
                found[name] = tuple(field.name for field in each.fields)
                todo.append(each.fields)
        elif isinstance(each, msgspec.inspect.Type):
            todo += [getattr(each, name) for name in each.__struct_fields__]
    return dict(sorted(found.items()))


def _plain(value: Any) -> Any:
    if isinstance(value, deque):
        return list(value)
    raise NotImplementedError(type(value))


def _rich(kind: Any, value: Any) -> Any:
    of = list[Noted] if kind == deque[Noted] else list[float]
    return deque(msgspec.convert(value, of))


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(_Snapshot)


@functools.cache
def _state_decoder() -> msgspec.msgpack.Decoder[State]:
    """Made when it is needed: it looks at a hundred types."""
    return msgspec.msgpack.Decoder(State, dec_hook=_rich)
