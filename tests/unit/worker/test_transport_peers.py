"""Who is a peer: gone, forgotten, named again, in a new incarnation; whose end is reported, and
whose is not.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.helpers.transports import SECRET, TIMEOUT_S, Device, MakeDevice, introduce


def test_a_new_secret_leaves_old_links_open(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.send("b/0", ("f", 1), [])
    b.receive(("f", 1))
    introduce(a, b, secret=b"n" * 32)
    a.transport.send("b/0", ("f", 2), [])
    b.transport.send("a/0", ("f", 3), [])
    b.receive(("f", 2))
    a.receive(("f", 3))
    assert a.lost == b.lost == []


def test_a_new_incarnation_replaces_the_old_one(make_device: MakeDevice, tmp_path: Path) -> None:
    a, old = make_device("a/0"), Device("b/0", tmp_path / "old")
    introduce(a, old)
    old.transport.send("a/0", ("f", 1), [])
    a.receive(("f", 1))
    new = make_device("b/0")
    introduce(a, new)
    a.transport.send("b/0", ("f", 2), [])
    new.receive(("f", 2))
    old.transport.close()
    assert a.lost == []


def test_the_forgotten_are_not_reported_and_not_let_in(make_device: MakeDevice) -> None:
    a, b = make_device("a/0", handshake_s=0.2), make_device("b/0", handshake_s=0.2)
    introduce(a, b)
    b.transport.send("a/0", ("f", 1), [])
    a.receive(("f", 1))
    a.transport.forget(["b/0"])
    assert not a.transport.send("b/0", ("f", 2), [])
    while b.transport.send("a/0", ("f", 3), []):
        threading.Event().wait(0.001)
    assert a.mailbox.take(("f", 3)) is None
    introduce(a, b)
    b.transport.send("a/0", ("f", 4), [])
    a.receive(("f", 4))
    assert a.lost == b.lost == []


def test_a_peer_that_is_forgotten_and_named_again_is_not_lost(make_device: MakeDevice) -> None:
    """The end of the links that we closed ourselves may be read only after the peer is back."""
    a, b = make_device("a/0", handshake_s=0.2), make_device("b/0", handshake_s=0.2)
    introduce(a, b)
    for number in range(20):
        b.transport.send("a/0", ("f", number), [])
        a.receive(("f", number))
        a.transport.forget(["b/0"])
        while b.transport.send("a/0", ("late", number), []):
            threading.Event().wait(0.0001)
        introduce(a, b)
    assert a.lost == []


def test_a_goodbye_that_is_heard_only_after_its_sender_was_named_again_is_of_the_links_before(
    make_device: MakeDevice,
) -> None:
    """All give a job back and are in the next layout at once: what is sent then was dropped, for ever."""
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    b.transport.send("a/0", ("f", 1), [])
    a.receive(("f", 1))
    a.transport.block(0.0)  # its reader gets no further than the goodbye
    b.transport.forget(["a/0"])
    a.transport.forget(["b/0"])
    introduce(a, b, secret=b"n" * 32)
    a.transport.block(0.001)
    sent = 0
    while a.transport._incoming or not sent:  # until it was heard, and once more
        sent += a.transport.send("b/0", ("f", sent), [])
    assert a.transport.send("b/0", ("f", "last"), [])
    b.receive(("f", "last"))
    assert a.transport.counts.dropped == 0


def test_an_end_that_is_told_only_after_its_peer_was_named_again_is_of_the_links_before(
    make_device: MakeDevice,
) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.send("b/0", ("f", 1), [])
    b.receive(("f", 1))
    link = a.transport._known["b/0"].link
    assert link is not None
    with a.transport._changed:  # whoever tells it has to wait
        b.transport.forget(["a/0"])
        assert link._stopped.wait(TIMEOUT_S)
        a.transport.forget(["b/0"])
        introduce(a, b, secret=b"n" * 32)
        assert a.transport.send("b/0", ("f", 2), [])
    b.receive(("f", 2))
    assert a.transport.send("b/0", ("f", 3), [])
    b.receive(("f", 3))
    assert a.lost == []


def test_nobody_at_the_address_is_a_loss_reported_once(make_device: MakeDevice, tmp_path: Path) -> None:
    a = make_device("a/0")
    gone = Device("b/0", tmp_path)
    address = gone.transport.peer
    gone.transport.close()
    a.transport.configure({"b/0": address}, SECRET)
    a.transport.send("b/0", ("f", 1), [])
    a.until(lambda: bool(a.lost))
    assert not a.transport.send("b/0", ("f", 2), [])
    assert [peer for peer, _ in a.lost] == ["b/0"]
    assert a.transport.counts.dropped == 1


def test_goodbye_is_no_loss_and_drops_later_messages(make_device: MakeDevice) -> None:
    a, b, c = make_device("a/0"), make_device("b/0"), make_device("c/0", "elsewhere")
    introduce(a, b, c)
    for one, other in ((a, "b/0"), (b, "a/0"), (c, "a/0")):
        one.transport.send(other, ("f", 1), [])
    b.receive(("f", 1))
    a.receive(("f", 1))
    a.receive(("f", 1))
    a.transport.close()
    for device in (b, c):
        while device.transport.send("a/0", ("f", 2), []):
            threading.Event().wait(0.001)
        assert device.lost == []


@pytest.mark.parametrize("anew", [True, False])
def test_the_end_of_a_link_says_nothing_of_one_who_was_named_anew_since(
    make_device: MakeDevice, anew: bool
) -> None:
    """It gave a job back of which nothing had come here, and both are in the next plan before we hear of
    that.
    """
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    for one, other in ((a, b), (b, a)):
        one.transport.send(other.transport.device, ("f", 0), [])
        other.receive(("f", 0))
    old = a.transport._known["b/0"].link
    assert old is not None
    a.transport.block(0.0)  # it gets no further than the goodbyes
    b.transport.forget(["a/0"])
    a.transport.configure({"b/0": b.transport.peer}, SECRET, ["b/0"] if anew else [])
    b.transport.configure({"a/0": a.transport.peer}, SECRET)
    a.transport.block(0.001)
    assert old._stopped.wait(TIMEOUT_S)
    while a.transport._incoming:
        threading.Event().wait(0.001)
    assert a.transport.send("b/0", ("f", 1), []) is anew
    if anew:
        b.receive(("f", 1))
    assert a.lost == b.lost == []


def test_what_comes_on_an_old_link_of_one_who_was_named_anew_is_taken_in(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.send("b/0", ("f", 0), [])
    b.receive(("f", 0))
    b.transport.configure({"a/0": a.transport.peer}, SECRET, ["a/0"])
    a.transport.send("b/0", ("f", 1), [])
    b.receive(("f", 1))
    assert a.transport.counts.dropped == 0


def test_one_who_is_late_ends_its_link_when_it_hears_of_what_made_us_name_it_anew(
    make_device: MakeDevice,
) -> None:
    """All give a job back, and one hears of it after the others are in the next layout: its link of before
    was taken for one of that.
    """
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.forget(["b/0"])
    a.transport.configure({"b/0": b.transport.peer}, b"n" * 32)
    b.transport.send("a/0", ("f", 1), [])  # with the secret of before, as it knows no other
    a.receive(("f", 1))
    b.transport.forget(["a/0"])
    while a.transport._incoming:
        threading.Event().wait(0.001)
    b.transport.configure({"a/0": a.transport.peer}, b"n" * 32)
    assert a.transport.send("b/0", ("f", 2), [])
    b.receive(("f", 2))
    assert a.lost == b.lost == []
