"""Bytes that are no message are a CodecError, whatever is wrong with them."""

from __future__ import annotations

import msgspec
import pytest

from oobleckd.protocol import codec
from oobleckd.protocol.messages import Goodbye


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
