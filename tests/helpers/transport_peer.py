"""A real process with a transport that sends every "ping" back as a "pong", for tests and measurements.

Prints ``{"address": …, "local": …, "host": …}``; reads one line ``{"peers": {…}, "secret": hex}``, then
echoes until its standard input ends, and says goodbye.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec

from oobleckd.protocol.parts import Peer
from oobleckd.worker.transport.mailbox import Mailbox
from oobleckd.worker.transport.transport import Transport


class Setup(msgspec.Struct):
    """What the parent tells."""

    peers: dict[str, Peer]
    secret: str


def main() -> None:
    """Arguments: device, host, directory of the Unix socket."""
    device, host, directory = sys.argv[1:]
    mailbox = Mailbox()
    transport = Transport(
        device, host, mailbox, local_dir=Path(directory), on_peer_lost=lambda *lost: mailbox.put_control(lost)
    )
    print(msgspec.json.encode(transport.peer).decode(), flush=True)
    setup = msgspec.json.decode(sys.stdin.readline(), type=Setup)
    transport.configure(setup.peers, bytes.fromhex(setup.secret))

    def until_end_of_input() -> None:
        sys.stdin.read()
        mailbox.put_control("end")

    threading.Thread(target=until_end_of_input, daemon=True).start()
    while "end" not in mailbox.controls():
        for message in mailbox.take_all("ping"):
            transport.send(message.source, ("pong", *message.key[1:]), message.tensors, message.meta)
        mailbox.wait()
    transport.close()


if __name__ == "__main__":
    main()
