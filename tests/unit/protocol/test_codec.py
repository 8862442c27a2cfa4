"""Bytes that are no message are a CodecError, whatever is wrong with them."""

from __future__ import annotations

import msgspec
import pytest

from oobleckd.protocol import codec
from oobleckd.protocol.agentmessages import Goodbye
from oobleckd.protocol.checkpointmessages import CheckpointFailed
from oobleckd.protocol.parts import Counters


@pytest.mark.parametrize("damaged", [b"", b"\xc1", b"\x81\xa4type\xa7Nothing", b"\x93\x01\x02\x03"])
def test_damage(damaged: bytes) -> None:
    with pytest.raises(codec.CodecError):
        codec.decode_from_worker(damaged)
    with pytest.raises(codec.CodecError):
        codec.decode_to_worker(damaged)


def test_a_text_that_is_not_utf8() -> None:
    whole = msgspec.msgpack.encode(Goodbye("life", "a reason"))
    assert codec.decode_from_worker(whole) == Goodbye("life", "a reason")
    with pytest.raises(codec.CodecError):
        codec.decode_from_worker(whole.replace(b"a reason", b"a re\xffson"))
    with pytest.raises(codec.CodecError):
        codec.decode_from_worker(whole.replace(b"Goodbye", b"Good\xffye"))


def test_why_a_disk_refused_is_read_from_a_device_that_does_not_name_it() -> None:
    """And what names it is read by a daemon that does not know the name."""
    told = CheckpointFailed("n/0", "j", Counters(), "d", "d cannot be written: full", errno="ENOSPC")
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(told))
    assert codec.decode_from_worker(msgspec.msgpack.encode(fields)) == told
    assert codec.decode_from_worker(msgspec.msgpack.encode(fields | {"of a later version": 1})) == told
    del fields["errno"]
    assert codec.decode_from_worker(msgspec.msgpack.encode(fields)) == msgspec.structs.replace(told, errno="")
