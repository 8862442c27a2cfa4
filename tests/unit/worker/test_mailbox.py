"""The mailbox: nothing is lost, nothing is slept over."""

from __future__ import annotations

import threading

from oobleckd.worker.transport.mailbox import Mailbox, TensorMessage


def message(*key: str | int, source: str = "a/0") -> TensorMessage:
    return TensorMessage(key, source, b"", [])


def test_messages_are_taken_by_key_oldest_first() -> None:
    mailbox = Mailbox()
    first, second, other = message("f", 1), message("f", 1, source="b/0"), message("f", 2)
    for each in (first, second, other):
        mailbox.put(each)
    assert mailbox.keys() == (("f", 1), ("f", 2))
    assert mailbox.take(("f", 1)) is first
    assert mailbox.take(("f", 1)) is second
    assert mailbox.take(("f", 1)) is None
    assert mailbox.keys() == (("f", 2),)


def test_take_all_takes_one_kind() -> None:
    mailbox = Mailbox()
    for each in (message("f", 1), message("g", 1), message("f", 2)):
        mailbox.put(each)
    assert [each.key for each in mailbox.take_all("f")] == [("f", 1), ("f", 2)]
    assert mailbox.keys() == (("g", 1),)


def test_purge_counts_what_it_drops() -> None:
    mailbox = Mailbox()
    for each in (message("f", 1), message("f", 1, source="b/0"), message("f", 2, source="b/0")):
        mailbox.put(each)
    assert mailbox.purge(lambda each: each.source == "b/0") == 2
    assert mailbox.keys() == (("f", 1),)


def test_wait_sees_what_came_before_it() -> None:
    mailbox = Mailbox()
    mailbox.put(message("f", 1))
    assert mailbox.wait(0)
    assert not mailbox.wait(0)
    mailbox.put_control("stop")
    mailbox.put_control("really")
    assert mailbox.wait(0)
    assert mailbox.controls() == ["stop", "really"]
    assert mailbox.controls() == []
    assert not mailbox.wait(0)


def test_no_wake_up_is_lost_between_threads() -> None:
    mailbox, num_messages, num_threads = Mailbox(), 500, 4

    def write(thread: int) -> None:
        for index in range(num_messages):
            mailbox.put(message("f", thread, index))

    threads = [threading.Thread(target=write, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    got: list[TensorMessage] = []
    while len(got) < num_messages * num_threads:
        assert mailbox.wait(30)
        got += mailbox.take_all("f")
    for thread in threads:
        thread.join()
    for index in range(num_threads):
        assert [each.key[2] for each in got if each.key[1] == index] == list(range(num_messages))
