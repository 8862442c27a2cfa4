"""Letters of a device to itself: they need no road."""

from __future__ import annotations

import torch

from worker.groups.plane import Plane
from worker.mailbox import Mailbox
from worker.post import TransportPost


class NoRoad:
    """A transport over which nothing may go."""

    device = "a/0"

    def send(self, *_: object) -> bool:
        raise AssertionError("a letter to itself took the road")


def test_a_letter_to_itself_is_there_at_once() -> None:
    mailbox, road = Mailbox(), NoRoad()
    post = TransportPost(road, Plane("a/0", mailbox, None, road.send), mailbox, torch.device("cpu"))
    key, tensor = ("F", 3, 0, 1, 4), torch.arange(3.0)
    assert post.send("a/0", key, [tensor])
    assert post.has(key)
    letter = post.take(key)
    assert letter is not None
    assert torch.equal(letter.tensors[0], tensor)
    assert not post.has(key)
