"""The exchange of sums: who contributes what and when, and that all contributions together are a step."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from oobleckd.planner.plan import Layers, Layout, Range
from oobleckd.worker.round_machine.commands import Contribute
from oobleckd.worker.round_machine.exchange import Contribution, Exchange
from oobleckd.worker.round_machine.ledger import Ledger

USES = ((0,), (1,), (0, 1))
"""Two layers and what both use, as a tied weight."""
HELD = {"a/0": Range(0, 2), "b/0": Range(0, 1), "c/0": Range(1, 2), "d/0": Range(0, 2)}
LAYOUT = Layout(3, 2, {device: Layers.of(held) for device, held in HELD.items()}, ())
TWO = frozenset({"a/0", "d/0"})
NO_DONORS: Mapping[int, str] = {}


def exchange_of(
    device: str = "a/0",
    owed: Mapping[int, set[int]] | None = None,
    *,
    live: frozenset[str] = TWO,
    donors: Mapping[int, str] = NO_DONORS,
) -> Exchange:
    """In round 5 of four micro-batches, under epoch 3."""
    exchange = Exchange(device, USES, 4)
    exchange.adopt(LAYOUT)
    ledger = Ledger.of(HELD[device].layers() if device in HELD else ())
    for layer, micro_batches in (owed or {}).items():
        for micro_batch in micro_batches:
            ledger.owe(layer, micro_batch)
    exchange.begin(5, ledger, (4, 4))
    exchange.enter(3, LAYOUT, live, donors)
    return exchange


def done(exchange: Exchange, counted: Mapping[int, set[int]]) -> None:
    for layer, micro_batches in counted.items():
        for micro_batch in micro_batches:
            exchange.ledger.count(layer, micro_batch)


def part(*micro_batches: int, use: int = 0) -> Contribution:
    return Contribution({use: micro_batches}, {mb: float(mb) for mb in micro_batches})


def own(exchange: Exchange, bucket: int) -> Contribution:
    return Contribution(exchange.counted(bucket))


# ---------------------------------------------------------------- contributing


def test_a_bucket_is_contributed_once_when_all_that_is_owed_to_its_uses_is_counted() -> None:
    exchange = exchange_of(owed={0: {0, 1}, 1: {1}})
    assert exchange.ready() == ()
    done(exchange, {0: {0, 1}})
    assert exchange.ready() == (Contribute(0, ("d/0",)),)
    assert exchange.ready() == ()
    done(exchange, {1: {1}})
    assert exchange.ready() == (Contribute(1, ("d/0",)), Contribute(2, ("d/0",)))
    exchange.ledger.excuse(())
    assert exchange.ready() == ()


def test_under_the_next_epoch_it_is_contributed_again_to_those_who_live() -> None:
    exchange = exchange_of(owed={0: {0}}, live=frozenset(HELD))
    done(exchange, {0: {0}})
    assert {each.bucket: each.peers for each in exchange.ready()} == {
        0: ("b/0", "d/0"),
        1: ("c/0", "d/0"),
        2: ("b/0", "c/0", "d/0"),
    }
    exchange.enter(4, LAYOUT, TWO, NO_DONORS)
    assert exchange.ready() == tuple(Contribute(bucket, ("d/0",)) for bucket in range(3))
    assert exchange.ready() == ()


def test_nothing_is_contributed_between_the_answer_to_a_report_and_the_decision() -> None:
    exchange = exchange_of(owed={0: {0}})
    exchange.open = False
    done(exchange, {0: {0}})
    assert exchange.ready() == ()
    exchange.enter(4, LAYOUT, TWO, NO_DONORS)
    assert len(exchange.ready()) == 3


def test_a_redundant_holder_contributes_nothing_at_once_and_takes_the_sums_of_the_others() -> None:
    exchange = exchange_of()
    ready = {each.bucket for each in exchange.ready()}
    assert ready == {0, 1, 2}
    empty = own(exchange, 0)
    assert empty.is_empty
    assert exchange.hear(0, "a/0", empty) is None
    assert exchange.hear(0, "d/0", part(0, 1, 2, 3)) == ("a/0", "d/0")
    assert not exchange.reduced[0].is_empty


def test_who_holds_nothing_takes_no_part() -> None:
    exchange = exchange_of("e/0")
    assert (exchange.ready(), exchange.complete, exchange.shared) == ((), True, [])
    assert not exchange.wants(0, "a/0")


# ---------------------------------------------------------------- hearing


def test_the_last_contribution_reduces_the_bucket_and_names_the_order_in_which_floats_are_added() -> None:
    exchange = exchange_of(live=frozenset({"a/0", "b/0", "d/0"}))
    assert exchange.hear(0, "d/0", part(0, 3)) is None
    assert exchange.hear(0, "a/0", part(2)) is None
    assert 0 not in exchange.reduced
    assert exchange.hear(0, "b/0", part(1)) == ("a/0", "b/0", "d/0")
    losses = {mb: float(mb) for mb in range(4)}
    assert exchange.reduced[0] == Contribution({0: (0, 1, 2, 3)}, losses)
    assert not exchange.complete


def test_what_was_reduced_with_a_wrong_sum_is_made_anew_under_the_next_epoch() -> None:
    exchange = exchange_of(owed={0: {0, 1}})
    done(exchange, {0: {0, 1}})
    exchange.ready()
    for device, what in (("a/0", own(exchange, 0)), ("d/0", part(2, 3))):
        exchange.hear(0, device, what)
    exchange.forget(0)
    assert (exchange.reduced, exchange.ready(), exchange.wants(0, "d/0")) == ({}, (), False)
    exchange.enter(4, LAYOUT, TWO, NO_DONORS)
    assert Contribute(0, ("d/0",)) in exchange.ready()
    assert exchange.wants(0, "a/0")
    assert exchange.wants(0, "d/0")


@pytest.mark.parametrize(
    "theirs",
    [(1, 2, 3), (0, 1, 2, 3), (1, 2), (2,), (), (2, 2, 3), (2, 2), (2, 3, 4), (2, 4)],
    ids=[
        "one-twice",
        "all-twice",
        "one-twice-for-one-missing",
        "one-missing",
        "two-missing",
        "twice-in-one",
        "twice-in-one-for-one-missing",
        "no-such",
        "no-such-for-one-missing",
    ],
)
def test_contributions_that_are_not_each_micro_batch_once_are_refused(theirs: tuple[int, ...]) -> None:
    exchange = exchange_of()
    exchange.hear(0, "a/0", part(0, 1))
    with pytest.raises(AssertionError):
        exchange.hear(0, "d/0", part(*theirs))
    assert 0 not in exchange.reduced


def test_every_use_of_a_bucket_has_its_own_ledger() -> None:
    everything = (0, 1, 2, 3)
    for missing in (0, 1):
        exchange = exchange_of()
        exchange.hear(2, "a/0", own(exchange, 2))
        with pytest.raises(AssertionError):
            exchange.hear(2, "d/0", part(*everything, use=1 - missing))
    exchange = exchange_of(live=frozenset({"b/0", "c/0", "a/0"}))
    exchange.hear(2, "a/0", own(exchange, 2))
    exchange.hear(2, "b/0", part(*everything, use=0))
    exchange.hear(2, "c/0", part(*everything, use=1))
    assert exchange.reduced[2].ledger == {0: everything, 1: everything}


def test_strangers_the_dead_and_a_second_word_are_not_wanted() -> None:
    exchange = exchange_of()
    assert exchange.wants(0, "a/0")
    assert exchange.wants(0, "d/0")
    for source in ("x/0", "b/0", "c/0"):  # of no layout; not live; holds another layer
        assert not exchange.wants(0, source)
        with pytest.raises(AssertionError):
            exchange.hear(0, source, part(0))
    assert not exchange.wants(9, "a/0")
    exchange.hear(0, "d/0", part(0, 1))
    assert not exchange.wants(0, "d/0")
    with pytest.raises(AssertionError):
        exchange.hear(0, "d/0", part(0, 1))
    exchange.hear(0, "a/0", part(2, 3))
    assert not any(exchange.wants(0, source) for source in HELD)


def test_what_is_reduced_is_so_under_later_epochs_and_the_rest_is_heard_anew() -> None:
    exchange = exchange_of()
    exchange.hear(0, "a/0", part(0, 1))
    exchange.hear(0, "d/0", part(2, 3))
    exchange.hear(1, "d/0", part(2, 3, use=1))
    exchange.enter(4, LAYOUT, TWO, NO_DONORS)
    assert not exchange.wants(0, "d/0")
    assert exchange.wants(1, "d/0")
    exchange.begin(6, exchange.ledger, (4, 4))
    exchange.enter(4, LAYOUT, TWO, NO_DONORS)
    assert exchange.wants(0, "d/0")


def test_all_is_complete_when_every_bucket_held_is_reduced() -> None:
    exchange = exchange_of("b/0", live=frozenset({"b/0", "c/0"}))
    assert exchange.held == {0: (0,), 2: (0,)}
    everything, seen = (0, 1, 2, 3), []
    for bucket, source, use in ((0, "b/0", 0), (2, "b/0", 0), (2, "c/0", 1)):
        seen.append(exchange.complete)
        exchange.hear(bucket, source, part(*everything, use=use))
    assert (seen, exchange.complete) == ([False, False, False], True)


def test_a_round_that_evaluates_has_one_bucket_which_the_holders_of_the_head_exchange() -> None:
    exchange = exchange_of(owed={0: {0}, 1: {0}})
    exchange.begin(6, Ledger.of((0, 1)), (4, 4), num_evaluated=3)
    exchange.enter(3, LAYOUT, frozenset(HELD), NO_DONORS)
    assert (exchange.held, exchange.holders) == ({0: (1,)}, {0: ("a/0", "c/0", "d/0")})
    assert exchange.ready() == (Contribute(0, ("c/0", "d/0")),)
    exchange.hear(0, "a/0", part(0, use=1))
    exchange.hear(0, "c/0", part(2, use=1))
    assert exchange.hear(0, "d/0", part(1, use=1)) == ("a/0", "c/0", "d/0")
    assert (exchange.reduced[0].ledger, exchange.complete) == ({1: (0, 1, 2)}, True)


@pytest.mark.parametrize("theirs", [(0, 1, 2, 3), (0, 1)])
def test_an_evaluation_is_of_its_own_number_of_micro_batches(theirs: tuple[int, ...]) -> None:
    exchange = exchange_of("c/0", live=frozenset({"c/0"}))
    exchange.begin(6, Ledger.of((1,)), (4, 4), num_evaluated=3)
    exchange.enter(3, LAYOUT, frozenset({"c/0"}), NO_DONORS)
    with pytest.raises(AssertionError):
        exchange.hear(0, "c/0", part(*theirs, use=1))


def test_who_does_not_hold_the_head_has_no_part_in_an_evaluation_and_its_own_in_the_step_after() -> None:
    exchange = exchange_of("b/0", live=frozenset(HELD))
    exchange.begin(6, Ledger.of((0,)), (4, 4), num_evaluated=3)
    exchange.enter(3, LAYOUT, frozenset(HELD), NO_DONORS)
    assert (exchange.held, exchange.ready(), exchange.complete) == ({}, (), True)
    exchange.begin(7, Ledger.of((0,)), (4, 4))
    exchange.enter(3, LAYOUT, frozenset(HELD), NO_DONORS)
    assert exchange.held == {0: (0,), 2: (0,)}
    assert {each.bucket for each in exchange.ready()} == {0, 2}


def test_a_use_that_no_live_device_has_is_missed() -> None:
    exchange = exchange_of("b/0", live=frozenset({"b/0"}))
    with pytest.raises(AssertionError):
        exchange.hear(2, "b/0", part(0, 1, 2, 3))


def test_buckets_are_shared_where_another_live_device_has_a_use_of_them() -> None:
    assert exchange_of("b/0", live=frozenset({"b/0", "c/0"})).shared == [2]
    assert exchange_of("b/0", live=frozenset({"b/0", "d/0"})).shared == [0, 2]


# ---------------------------------------------------------------- donors


def test_a_donor_sends_the_total_and_its_peers_take_that_and_nothing_else() -> None:
    donors = {0: "d/0"}
    taking = exchange_of(owed={0: {0}}, donors=donors)
    done(taking, {0: {0}})
    assert 0 not in {each.bucket for each in taking.ready()}
    assert not taking.wants(0, "a/0")
    total = part(0, 1, 2, 3)
    assert taking.hear(0, "d/0", total) == ("d/0",)
    assert taking.reduced[0].ledger == total.ledger

    giving = exchange_of("d/0")
    giving.hear(0, "a/0", part(0, 1))
    giving.hear(0, "d/0", part(2, 3))
    giving.enter(4, LAYOUT, TWO, donors)
    assert Contribute(0, ("a/0",), donated=True) in giving.ready()
    assert not giving.wants(0, "d/0")  # its own: the total is there


def test_a_donor_s_total_is_looked_at_as_all_others_are() -> None:
    exchange = exchange_of(donors={0: "d/0"})
    with pytest.raises(AssertionError):
        exchange.hear(0, "d/0", part(0, 1, 2))
