"""Several connections of one node: the newest counts."""

from __future__ import annotations

import pytest

from oobleckd.daemon.connections import MAX_EARLY, Connection, Connections
from oobleckd.protocol.agentmessages import Heartbeat, Hello
from oobleckd.protocol.messages import PROTOCOL, FromWorker

HELLO = Hello(PROTOCOL, "n", "incarnation.1", "host", True, ())


class Listener:
    """What is passed on; None: a link is lost."""

    def __init__(self) -> None:
        self.heard: list[FromWorker | None] = []
        self.connections: Connections[Connection] = Connections()
        self.connections.listen(lambda _, said: self.heard.append(said), lambda _: self.heard.append(None))


def test_what_came_before_hello_waits_for_it() -> None:
    listener, connection = Listener(), Connection()
    listener.connections.heard(connection, Heartbeat("early"))
    assert listener.heard == []
    listener.connections.introduced(connection, "n", HELLO)
    assert listener.heard == [HELLO, Heartbeat("early")]
    assert listener.connections.of("n") is connection


@pytest.mark.parametrize("more", [-100, 0, 1, 100])
def test_of_what_came_before_hello_the_newest_are_kept(more: int) -> None:
    listener, connection = Listener(), Connection()
    said = [Heartbeat(str(number)) for number in range(MAX_EARLY + more)]
    for heartbeat in said:
        listener.connections.heard(connection, heartbeat)
    listener.connections.introduced(connection, "n", HELLO)
    assert listener.heard == [HELLO, *said[-MAX_EARLY:]]


def test_a_newer_connection_is_a_lost_link_and_the_older_one_s_end_is_no_other() -> None:
    listener, old, new = Listener(), Connection(), Connection()
    listener.connections.introduced(old, "n", HELLO)
    listener.connections.introduced(new, "n", HELLO)
    assert listener.heard == [HELLO, None, HELLO]
    listener.connections.closed(old)
    assert listener.connections.of("n") is new
    listener.connections.closed(new)
    assert listener.heard == [HELLO, None, HELLO, None]
    assert listener.connections.of("n") is None


def test_late_words_of_an_older_connection_do_not_count() -> None:
    listener, old, new = Listener(), Connection(), Connection()
    for connection in (old, new):
        listener.connections.introduced(connection, "n", HELLO)
    listener.heard.clear()
    listener.connections.heard(old, Heartbeat("incarnation.0"))
    assert listener.heard == []
    assert old.replaced


def test_hello_again_on_the_same_connection_is_news_and_no_loss() -> None:
    listener, connection = Listener(), Connection()
    for _ in range(2):
        listener.connections.introduced(connection, "n", HELLO)
    assert listener.heard == [HELLO, HELLO]


def test_a_connection_that_never_said_who_it_is_ends_unnoticed() -> None:
    listener = Listener()
    listener.connections.closed(Connection())
    assert listener.heard == []
