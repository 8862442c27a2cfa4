"""TCP as daemon and agents use it: over IPv6 too, and when the kernel gives up a connection whose other end
is gone without a word: a host without power, a network that is cut.

No more than that: who is alive is decided by leases. ZeroMQ's own heartbeats would do the same, and cost a
daemon with thousands of connections more than all that it hears: each is two more messages, and libzmq looks
for a timer that it ends among those of all connections.
"""

from __future__ import annotations

from typing import Any

# The kernel's timers and not ZeroMQ's heartbeats, each of which is two more messages and a look among all
# timers: 71 % of a core with 10,000 connections, now 13. (D-daemon-010)
UNANSWERED_S = 8.0
"""Without an answer to what was sent a connection ends: some four packets lost one after another."""
_OPTIONS = {
    "tcp_maxrt": int(1000 * UNANSWERED_S),  # ms
    "tcp_keepalive": 1,
    "tcp_keepalive_idle": 4,  # s
    "tcp_keepalive_intvl": 2,  # s
    "tcp_keepalive_cnt": 3,
}


def speak(socket: Any, endpoint: str) -> None:
    """Have a ``zmq.Socket`` bind or connect over IPv6 where ``endpoint`` has such an address, in brackets.

    Not always: with it libzmq asks for a name's IPv6 address first, at which nobody may listen.
    """
    socket.ipv6 = "[" in endpoint


def drop_dead(socket: Any) -> None:
    """Have connections of a ``zmq.Socket`` that are made from now on dropped some 10 s after their other end
    is gone.
    """
    for name, value in _OPTIONS.items():
        setattr(socket, name, value)
