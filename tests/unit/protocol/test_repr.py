"""What only its receiver may know comes into no log by way of a repr."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from oobleckd.protocol.agentmessages import Welcome
from oobleckd.protocol.messages import FromWorker, ToWorker
from oobleckd.protocol.parts import DATAGRAM_KEY_BYTES, DATAGRAM_SESSION_BYTES, DatagramSession

SECRET = "5ec3e7"
ALL: tuple[Any, ...] = (*get_args(FromWorker), *get_args(ToWorker))


@pytest.mark.parametrize("message", [each for each in ALL if "secret" in each.__struct_fields__])
def test_of_a_message_with_a_secret(message: Any) -> None:
    said = repr(message(**{name: SECRET if name == "secret" else name for name in message.__struct_fields__}))
    assert SECRET not in said
    assert said.startswith(f"{message.__name__}(device='device', ")
    assert "secret=..." in said


def test_of_a_key_within_a_message() -> None:
    session = DatagramSession(1, b"s" * DATAGRAM_SESSION_BYTES, b"k" * DATAGRAM_KEY_BYTES)
    said = repr(Welcome(7, "daemon", 1.0, 2.0, datagrams=session))
    assert "kkk" not in said
    assert f"datagrams=DatagramSession(port=1, session={session.session!r}, key=...)" in said
