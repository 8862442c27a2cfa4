"""What waits in memory while the holders of a bucket exchange their sums."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from torch import Tensor

from worker.reduce import Contribution, _Gathered

HOLDERS = ("a/0", "b/0", "c/0")


def contribution(*micro_batches: int) -> Contribution:
    return Contribution({0: micro_batches}, nan=False, overflow=False, losses={})


def integers(seed: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(-(2**50), 2**50, (5,), generator=made).double() for _ in range(2)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_integers_are_added_as_they_come_and_none_waits(order: tuple[int, ...]) -> None:
    terms = [integers(seed) for seed in range(3)]
    wanted = [a + b + c for a, b, c in zip(*terms, strict=True)]
    first = [tensor.clone() for tensor in terms[order[0]]]
    gathered = _Gathered()
    waiting: list[weakref.ref[Tensor]] = []
    for number, index in enumerate(order):
        gathered.take(HOLDERS[index], contribution(index), terms[index], exact=True)
        if number > 0:
            waiting += [weakref.ref(tensor) for tensor in terms[index]]
            terms[index] = []
    assert [ref() for ref in waiting] == [None] * 4
    found = gathered.total(HOLDERS)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    # What a holder gave is its own: it is sent again after a failure.
    assert all(torch.equal(one, other) for one, other in zip(terms[order[0]], first, strict=True))


def test_float_sums_wait_for_their_order() -> None:
    terms = {holder: [torch.tensor([value])] for holder, value in zip(HOLDERS, (1e8, 1.0, -1e8), strict=True)}
    gathered = _Gathered()
    for number, holder in reversed(list(enumerate(HOLDERS))):
        gathered.take(holder, contribution(number), terms[holder], exact=False)
    assert gathered.total(HOLDERS)[0] == (terms["a/0"][0] + terms["b/0"][0]) + terms["c/0"][0]


def test_a_holder_counts_once() -> None:
    gathered = _Gathered()
    for _ in range(3):
        gathered.take("a/0", contribution(0), [torch.ones(2).double()], exact=True)
        gathered.take("b/0", contribution(1), [torch.ones(2).double()], exact=True)
    assert gathered.total(("a/0", "b/0"))[0].tolist() == [2.0, 2.0]


def test_who_has_computed_nothing_adds_nothing() -> None:
    gathered = _Gathered()
    gathered.take("a/0", contribution(), [], exact=True)
    gathered.take("b/0", contribution(0, 1), [torch.ones(2).double()], exact=True)
    assert gathered.total(("a/0", "b/0"))[0].tolist() == [1.0, 1.0]
