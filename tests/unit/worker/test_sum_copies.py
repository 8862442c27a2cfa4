"""Which copies of sums go out, and which of those that come in count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from oobleckd.planner.plan import Layers, Layout, Range
from oobleckd.worker.round.sum_copies import Copies
from oobleckd.worker.round_machine.copies import SumCopies, SumCopy
from oobleckd.worker.round_machine.exchange import Exchange
from oobleckd.worker.round_machine.ledger import Ledger
from oobleckd.worker.transport.mailbox import Key, TensorMessage

LAYOUT = Layout(3, 2, {name: Layers.of(Range(0, 2)) for name in ("a/0", "b/0", "c/0")}, ())
LIVE = frozenset(LAYOUT.holdings)
OWED = 4


class Reducer:
    """Of ``oobleckd.worker.round.reduce.Reducer`` what copies ask for."""

    def __init__(self) -> None:
        ledger = Ledger({0: set(range(OWED)), 1: set(range(OWED))}, {0: set(), 1: set()})
        self.exchange = Exchange("b/0", [(0,), (1,)], [(1,)] * 2, OWED, OWED, ledger)
        self.inherited: list[tuple[SumCopy, Sequence[torch.Tensor]]] = []

    def copied(self, layers: Sequence[int]) -> tuple[SumCopy, list[torch.Tensor]]:
        done = {layer: counted for layer, counted in self.exchange.ledger.counted(layers).items() if counted}
        return SumCopy(done, (), (), {}), [torch.ones(1)]

    def inherit(self, what: SumCopy, tensors: Sequence[torch.Tensor]) -> None:
        self.inherited.append((what, tensors))


class Messenger:
    """Tensor messages that went out, and those that lie here."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Key]] = []
        self.messages: dict[Key, TensorMessage] = {}

    def send(self, peer: str, key: Key, _tensors: Sequence[torch.Tensor], _meta: bytes = b"") -> None:
        self.sent.append((peer, key))

    def recall(self, peer: str, unwanted: Callable[[Key], bool]) -> list[Key]:
        raise AssertionError

    def waiting(self) -> list[Key]:
        return list(self.messages)

    def take(self, key: Key) -> TensorMessage | None:
        return self.messages.pop(key, None)

    def has(self, key: Key) -> bool:
        return key in self.messages

    def purge(self, unwanted: Callable[[Key], bool]) -> None:
        raise AssertionError


def copies(per_round: int = 3) -> tuple[Copies, Reducer, Messenger]:
    reducer, messenger = Reducer(), Messenger()
    here: Any = reducer
    plan = SumCopies("b/0", per_round)
    plan.adopt(3)
    plan.begin(7)
    plan.enter(LAYOUT, LIVE, (0, 1))
    return Copies(plan, messenger, here), reducer, messenger


def inherit(made: Copies, *dead: str) -> None:
    """As the device does when it answers a report."""
    for device, what in made.plan.inherit(frozenset(dead)).items():
        made.inherit(device, what)


def compute(reducer: Reducer, micro_batch: int) -> None:
    for layer in reducer.exchange.ledger.done:
        reducer.exchange.ledger.count(layer, micro_batch)


def arrive(messenger: Messenger, made: Copies, *key: str | int, what: SumCopy | None = None) -> None:
    meta = msgspec.msgpack.encode(what or SumCopy({0: (1,)}, (), (), {}))
    messenger.messages[key] = TensorMessage(key, str(key[3]), meta, [torch.zeros(1)])
    made.hear_all()


def test_the_holder_behind_keeps_and_the_last_asks_the_first() -> None:
    made, _, _ = copies()
    assert made.plan.keepers == {0: "c/0", 1: "c/0"}
    made.plan.enter(LAYOUT, {"a/0", "b/0"}, (0, 1))
    assert made.plan.keepers == {0: "a/0", 1: "a/0"}
    made.plan.enter(LAYOUT, {"b/0"}, (0, 1))
    assert made.plan.keepers == {}


def test_parts_are_equal_and_the_last_is_contributed_instead() -> None:
    made, reducer, messenger = copies(per_round=1)
    for micro_batch in range(OWED):
        compute(reducer, micro_batch)
        made.send()
        made.plan.awaited.clear()
        assert len(messenger.sent) == (micro_batch >= 1)
    assert messenger.sent == [("c/0", ("C", 3, 7, "b/0"))]


def test_no_copy_says_what_was_inherited_while_the_one_before_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is in the ledger at once, and in the sums only when the next epoch is entered."""
    made, reducer, messenger = copies()
    held = {"a/0": Layers.of(Range(1, 2)), "b/0": Layers.of(Range(0, 2)), "c/0": Layers.of(Range(0, 1))}
    made.plan.enter(msgspec.structs.replace(LAYOUT, holdings=held), LIVE, (0, 1))
    assert made.plan.keepers == {0: "c/0", 1: "a/0"}
    arrive(messenger, made, "C", 3, 7, "c/0")
    copied = reducer.copied

    def reported_meanwhile(layers: Sequence[int]) -> tuple[SumCopy, list[torch.Tensor]]:
        found = copied(layers)
        inherit(made, "c/0")
        return found

    monkeypatch.setattr(reducer, "copied", reported_meanwhile)
    compute(reducer, 0)
    messenger.sent.clear()
    made.send()
    assert [peer for peer, _ in messenger.sent] == ["a/0"]
    assert reducer.inherited


def test_none_is_sent_where_none_is_asked_for() -> None:
    made, reducer, messenger = copies(per_round=0)
    compute(reducer, 0)
    made.send()
    assert not messenger.sent


def test_the_next_waits_until_the_one_before_has_arrived() -> None:
    made, reducer, messenger = copies()
    for micro_batch in range(2):
        compute(reducer, micro_batch)
        made.send()
    assert len(messenger.sent) == 1
    arrive(messenger, made, "K", 3, 7, "c/0")
    compute(reducer, 2)
    made.send()
    assert len(messenger.sent) == 2


def test_nobody_waits_for_the_word_of_the_dead() -> None:
    made, reducer, messenger = copies()
    compute(reducer, 0)
    made.send()
    made.plan.enter(LAYOUT, LIVE - {"c/0"}, (0, 1))
    compute(reducer, 1)
    made.send()
    assert [peer for peer, _ in messenger.sent] == ["c/0", "a/0"]


def test_the_last_copy_of_the_dead_counts_once() -> None:
    made, reducer, messenger = copies()
    arrive(messenger, made, "C", 3, 7, "a/0", what=SumCopy({0: (1,)}, (), (), {}))
    last = SumCopy({0: (1, 2)}, (5,), (), {2: 0.5})
    arrive(messenger, made, "C", 3, 7, "a/0", what=last)
    assert messenger.sent == [("a/0", ("K", 3, 7, "b/0"))] * 2
    inherit(made, "a/0")
    inherit(made, "a/0")
    assert [what for what, _ in reducer.inherited] == [last]


@pytest.mark.parametrize(
    ("key", "answered"),
    [
        (("C", 2, 7, "a/0"), False),  # of a layout that is over
        (("C", 3, 6, "a/0"), True),  # of the round before
    ],
)
def test_what_is_over_does_not_count(key: Key, answered: bool) -> None:
    made, reducer, messenger = copies()
    arrive(messenger, made, *key)
    inherit(made, "a/0")
    assert not reducer.inherited
    assert not messenger.messages
    assert bool(messenger.sent) == answered


def test_what_comes_from_ahead_waits_for_its_round() -> None:
    made, reducer, messenger = copies()
    arrive(messenger, made, "C", 3, 8, "a/0")
    assert not messenger.sent
    made.plan.begin(8)
    made.begin()
    made.hear_all()
    inherit(made, "a/0")
    assert len(reducer.inherited) == 1


@pytest.mark.parametrize("round_", [7, 8])
def test_what_comes_after_the_answer_does_not_count(round_: int) -> None:
    made, reducer, messenger = copies()
    key = ("C", 3, round_, "a/0")
    messenger.messages[key] = TensorMessage(key, "a/0", b"", [])
    inherit(made, "a/0")
    made.hear_all()
    assert not messenger.messages
    assert not reducer.inherited


def test_a_round_that_is_committed_leaves_no_copy() -> None:
    made, reducer, messenger = copies()
    arrive(messenger, made, "C", 3, 7, "a/0")
    made.plan.begin(8)
    made.begin()
    inherit(made, "a/0")
    assert not reducer.inherited
