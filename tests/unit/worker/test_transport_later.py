"""Tensor messages that can wait: behind all others, and taken back before they leave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from tests.helpers.transports import TIMEOUT_S, MakeDevice, introduce


def test_what_can_wait_leaves_behind_all_others_and_in_its_own_order(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.block(0.0)
    for number in range(3):
        assert a.transport.send("b/0", ("S", number), [torch.ones(3)], later=True)
        assert a.transport.send("b/0", ("F", number), [])
    assert not a.transport.flush(0.01)
    a.transport.block(0.001)
    b.receive(("S", 2))
    assert a.transport.flush(TIMEOUT_S)
    assert list(b.mailbox.keys()) == [("F", 0), ("F", 1), ("F", 2), ("S", 0), ("S", 1)]


def test_what_has_not_left_is_taken_back(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    assert a.transport.recall("b/0", lambda _: True) == []  # no link is there yet
    a.transport.block(0.0)
    for number in range(4):
        a.transport.send("b/0", ("S", number), [], later=True)
    a.transport.send("b/0", ("F", 0), [])
    assert a.transport.recall("b/0", lambda key: key != ("S", 2)) == [("S", 0), ("S", 1), ("S", 3)]
    assert a.transport.counts.dropped == 3
    a.transport.block(0.001)
    b.receive(("S", 2))
    assert list(b.mailbox.keys()) == [("F", 0)]
    assert a.transport.recall("b/0", lambda _: True) == []
    assert a.transport.recall("c/0", lambda _: True) == []


def test_taking_all_back_leaves_nothing_to_flush(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.block(0.0)
    a.transport.send("b/0", ("S", 0), [], later=True)
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(a.transport.flush, TIMEOUT_S)
        assert a.transport.recall("b/0", lambda _: True) == [("S", 0)]
        assert flushed.result(TIMEOUT_S)
    a.transport.block(0.001)


def test_what_can_wait_is_dropped_with_its_link(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    introduce(a, b)
    a.transport.block(0.0)
    a.transport.send("b/0", ("S", 0), [], later=True)
    a.transport.forget(["b/0"])
    assert not a.transport.send("b/0", ("S", 1), [], later=True)
    a.transport.block(0.001)
