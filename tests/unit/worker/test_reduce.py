"""What waits in memory while the holders of a bucket exchange their sums."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from torch import Tensor

from oobleckd.worker.messaging.gather import Gathered, Gathering, Intake, key_of
from oobleckd.worker.transport.mailbox import Mailbox, TensorMessage
from oobleckd.worker.transport.wire import WireError

HOLDERS = ("a/0", "b/0", "c/0")
BESIDE = torch.zeros(3, dtype=torch.float64)
"""What travels beside sums."""


def integers(seed: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(-(2**50), 2**50, (5,), generator=made).double() for _ in range(2)]


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_integers_are_added_as_they_come_and_none_waits(order: tuple[int, ...], lent: bool) -> None:
    terms = [integers(seed) for seed in range(3)]
    wanted = [a + b + c for a, b, c in zip(*terms, strict=True)]
    first = [tensor.clone() for tensor in terms[order[0]]]
    gathered = Gathered(HOLDERS, exact=True)
    waiting: list[weakref.ref[Tensor]] = []
    for number, index in enumerate(order):
        assert gathered.add(HOLDERS[index], [*terms[index], BESIDE], lent=lent)
        if number > 0:
            waiting += [weakref.ref(tensor) for tensor in terms[index]]
            terms[index] = []
    assert [ref() for ref in waiting] == [None] * 4
    found = gathered.total()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    # What a holder gave is its own: it is sent again after a failure.
    assert all(torch.equal(one, other) for one, other in zip(terms[order[0]], first, strict=True))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_own_integers_are_a_part_of_their_own_and_those_of_others_another(order: tuple[int, ...]) -> None:
    """Nothing is copied where our own are here, and they stay as they are."""
    terms = [integers(seed) for seed in range(3)]
    wanted = [a + b + c for a, b, c in zip(*terms, strict=True)]
    mine = [tensor.clone() for tensor in terms[0]]
    gathered = Gathered(HOLDERS, exact=True)
    for index in order:
        gathered.add(HOLDERS[index], [*terms[index], BESIDE], lent=index > 0, own=index == 0)
    own, others = gathered.parts()
    assert all(one is other for one, other in zip(own, terms[0], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(own, mine, strict=True))
    assert (others[0] is terms[order[1]][0]) == (order[0] == 0)
    found = gathered.total()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_of_lent_integers_not_even_the_first_are_kept() -> None:
    gathered, tensors = Gathered(HOLDERS, exact=True), integers(0)
    kept = [weakref.ref(tensor) for tensor in tensors]
    gathered.add("a/0", [*tensors, BESIDE], lent=True)
    tensors = []
    assert [ref() for ref in kept] == [None, None]


@pytest.mark.parametrize("lent", [False, True])
def test_float_sums_wait_for_their_order(lent: bool) -> None:
    terms = {holder: [torch.tensor([value])] for holder, value in zip(HOLDERS, (1e8, 1.0, -1e8), strict=True)}
    gathered = Gathered(HOLDERS, exact=False)
    for holder in reversed(HOLDERS):
        gathered.add(holder, [*terms[holder], BESIDE], lent=lent)
    assert gathered.total()[0] == (terms["a/0"][0] + terms["b/0"][0]) + terms["c/0"][0]


@pytest.mark.parametrize("lent", [False, True])
def test_what_travels_beside_sums_is_kept_by_its_source(lent: bool) -> None:
    gathered = Gathered(HOLDERS, exact=True)
    beside = {holder: torch.full((3 + number,), float(number)) for number, holder in enumerate(HOLDERS)}
    for holder, tensor in beside.items():
        gathered.add(holder, [torch.ones(2).double(), tensor], lent=lent)
    beside["a/0"][0] = 9.0  # the reader's own, where it is lent
    assert gathered.beside["a/0"][0] == (0.0 if lent else 9.0)
    assert torch.equal(gathered.beside["c/0"], beside["c/0"])
    assert gathered.total()[0].tolist() == [3.0, 3.0]


def test_a_holder_counts_once_and_a_stranger_not_at_all() -> None:
    gathered = Gathered(("a/0", "b/0"), exact=True)
    for number in range(3):
        assert gathered.add("a/0", [torch.ones(2).double(), BESIDE]) == (number == 0)
        assert gathered.add("b/0", [torch.ones(2).double(), BESIDE], lent=True) == (number == 0)
        assert not gathered.add("c/0", [torch.ones(2).double(), BESIDE])
    assert gathered.total()[0].tolist() == [2.0, 2.0]


def test_who_has_computed_nothing_adds_nothing() -> None:
    gathered = Gathered(("a/0", "b/0"), exact=True)
    gathered.add("b/0", [torch.ones(2).double(), BESIDE])
    assert gathered.total()[0].tolist() == [1.0, 1.0]


def message_of(epoch: int, round_: int, bucket: int, source: str, tensors: list[Tensor]) -> TensorMessage:
    return TensorMessage(key_of(epoch, round_, bucket, source), source, b"ledger", tensors)


def test_a_reader_adds_what_belongs_to_the_open_exchange_and_passes_on_all_else() -> None:
    mailbox = Mailbox()
    intake = Intake(mailbox)
    ahead = message_of(3, 7, 0, "b/0", [*integers(0), BESIDE])
    intake.put(ahead)  # before any exchange is open
    gathered = Gathered(HOLDERS, exact=True)
    intake.gathering = Gathering(2, 6, {0: gathered})
    ones = [torch.ones(2).double(), BESIDE]
    others = [
        message_of(1, 6, 0, "b/0", ones),  # of the last epoch
        message_of(2, 7, 0, "b/0", ones),  # of the next round
        message_of(2, 6, 1, "b/0", ones),  # of a bucket that is not here
        message_of(2, 6, 0, "d/0", ones),  # of nobody whose sums are wanted
        message_of(2, 6, 0, "c/0", []),  # of redundant layers
        TensorMessage(("F", 1), "b/0", b"", ones),
        TensorMessage(("G",), "b/0", b"", ones),
    ]
    for message in [*others, message_of(2, 6, 0, "b/0", ones), message_of(2, 6, 0, "b/0", ones)]:
        intake.put(message)
    assert gathered.total()[0].tolist() == [1.0, 1.0]
    for message in [ahead, *others]:
        assert mailbox.take(message.key) is message
    first, second = mailbox.take(key_of(2, 6, 0, "b/0")), mailbox.take(key_of(2, 6, 0, "b/0"))
    assert first is not None
    assert (first.tensors, first.meta, first.added) == ([], b"ledger", True)
    assert second is not None
    assert (len(second.tensors), second.added) == (
        2,
        False,
    )  # sent twice: the executor has heard of it already


def test_sums_that_do_not_fit_are_refused() -> None:
    gathered = Gathered(HOLDERS, exact=True)
    intake = Intake(Mailbox())
    intake.gathering = Gathering(1, 1, {0: gathered})
    intake.put(message_of(1, 1, 0, "a/0", [torch.ones(2).double(), BESIDE]))
    with pytest.raises(WireError, match="do not fit"):
        intake.put(message_of(1, 1, 0, "b/0", [torch.ones(3).double(), BESIDE]))
    with pytest.raises(WireError, match="do not fit"):
        intake.put(message_of(1, 1, 0, "c/0", [*[torch.ones(2).double()] * 2, BESIDE]))


def test_two_large_contributions_at_a_time_and_all_else_at_once() -> None:
    intake = Intake(Mailbox())
    large = 1 << 20
    with intake.room(key_of(1, 1, 0, "a/0"), large), intake.room(key_of(1, 1, 0, "b/0"), large):
        third = intake.room(key_of(1, 1, 0, "c/0"), large)
        assert not third.acquire(blocking=False)
        with intake.room(("F", 1), large), intake.room(key_of(1, 1, 1, "c/0"), large - 1):
            pass
    with third:
        pass
