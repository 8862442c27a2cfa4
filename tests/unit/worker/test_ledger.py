"""The ledger: what is owed is counted once, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from oobleckd.worker.round_machine.ledger import Ledger


def ledger_of(owed: dict[int, list[int]]) -> Ledger:
    ledger = Ledger.of(owed)
    for layer, micro_batches in owed.items():
        for micro_batch in micro_batches:
            ledger.owe(layer, micro_batch)
    return ledger


def test_what_is_owed_is_counted_and_then_the_layer_is_complete() -> None:
    ledger = ledger_of({0: [1, 0], 2: []})
    assert (ledger.complete(0), ledger.complete(2)) == (False, True)
    ledger.count(0, 1)
    assert (ledger.complete(0), ledger.totals) == (False, (1, 2))
    ledger.count(0, 0)
    assert (ledger.complete(0), ledger.totals) == (True, (2, 2))
    assert ledger.counted([0, 2]) == {0: (0, 1), 2: ()}


def test_nothing_is_counted_twice() -> None:
    ledger = ledger_of({0: [0, 1]})
    ledger.count(0, 0)
    with pytest.raises(AssertionError):
        ledger.count(0, 0)
    assert ledger.counted([0]) == {0: (0,)}


@pytest.mark.parametrize(("layer", "micro_batch"), [(0, 1), (1, 0)])
def test_only_what_is_owed_is_counted(layer: int, micro_batch: int) -> None:
    ledger = ledger_of({0: [0], 1: [1]})
    with pytest.raises(AssertionError):
        ledger.count(layer, micro_batch)
    assert ledger.totals == (0, 2)


def test_an_excuse_keeps_what_is_done_and_takes_the_rest() -> None:
    ledger = ledger_of({0: [0, 1, 2], 1: [0, 1, 2]})
    ledger.count(0, 1)
    ledger.excuse({1, 2})
    assert (ledger.owed, ledger.counted([0, 1])) == ({0: {0, 1}, 1: {0}}, {0: (1,), 1: ()})
    with pytest.raises(AssertionError):  # a result that comes too late
        ledger.count(1, 1)
    ledger.owe(1, 1)
    ledger.count(1, 1)
    with pytest.raises(AssertionError):  # what stayed in the sums, computed once more
        ledger.count(0, 1)


def test_what_is_inherited_is_owed_and_done_at_once_and_never_computed_too() -> None:
    ledger = ledger_of({0: [0]})
    ledger.inherit(0, 7)
    assert (ledger.totals, ledger.complete(0)) == ((1, 2), False)
    for again in (ledger.inherit, ledger.count):
        with pytest.raises(AssertionError):
            again(0, 7)


def test_whatever_may_complete_a_layer_shows_in_the_number_of_completions() -> None:
    """By it others know that nothing more is complete than when they looked last."""
    ledger = ledger_of({0: [0, 1, 2, 3], 1: [0]})

    def completes(change: Callable[[], object]) -> bool:
        before = ledger.completions
        change()
        return ledger.completions > before

    assert not completes(lambda: ledger.count(0, 0))
    assert completes(lambda: ledger.count(1, 0))
    assert not completes(lambda: ledger.inherit(0, 1))
    assert completes(lambda: ledger.excuse({2, 3}))
    assert ledger.complete(0)
    assert not completes(lambda: ledger.owe(0, 2))
    assert completes(lambda: ledger.inherit(0, 2))
    assert not completes(lambda: (ledger.complete(0), ledger.counted([0]), ledger.totals))
