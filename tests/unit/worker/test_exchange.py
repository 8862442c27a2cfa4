"""The exchange of sums and means: who sends what and when, and that all contributions together are a step."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from oobleckd.planner.plan import Layers, Layout, Range
from oobleckd.worker.round_machine.commands import Contribute, Give
from oobleckd.worker.round_machine.exchange import NO_DONORS, Contribution, Donors, Exchange, Given
from oobleckd.worker.round_machine.ledger import Ledger
from oobleckd.worker.round_machine.makers import Makes, makers

USES = ((0,), (1,), (0, 1))
"""Two layers and what both use, as a tied weight."""
HELD = {"a/0": Range(0, 2), "b/0": Range(0, 1), "c/0": Range(1, 2), "d/0": Range(0, 2)}
LAYOUT = Layout(3, 2, {device: Layers.of(held) for device, held in HELD.items()}, ())
TWO = frozenset({"a/0", "d/0"})
WHOLE = ((1,),) * 3
"""Buckets are not cut: of each the holder with its number in their order, from the first on again, is the
owner.
"""
CUT = ((1 << 20,) * 4,) * 3


def exchange_of(
    device: str = "a/0",
    owed: Mapping[int, set[int]] | None = None,
    *,
    live: frozenset[str] = TWO,
    donors: Donors = NO_DONORS,
    numbers: tuple[tuple[int, ...], ...] = WHOLE,
    twice: bool = False,
) -> Exchange:
    """In round 5 of four micro-batches, under epoch 3."""
    exchange = Exchange(device, USES, numbers, 4)
    exchange.adopt(LAYOUT)
    ledger = Ledger.of(HELD[device].layers() if device in HELD else ())
    for layer, micro_batches in (owed or {}).items():
        for micro_batch in micro_batches:
            ledger.owe(layer, micro_batch)
    exchange.begin(5, ledger, (4, 4), twice=twice)
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


def given(slices: int = 1, **ledgers: tuple[int, ...]) -> Given:
    """Means of use 0. ``ledgers``: by holder, "d" for "d/0"."""
    return Given(slices, {f"{name}/0": {0: counted} for name, counted in ledgers.items()})


# ---------------------------------------------------------------- makers


@pytest.mark.parametrize("num_holders", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("num_slices", [1, 3, 16, 64])
@pytest.mark.parametrize("twice", [False, True])
def test_each_slice_has_one_owner_and_another_holder_makes_it_too(
    num_holders: int, num_slices: int, twice: bool
) -> None:
    holders = tuple(f"n{number:02}/0" for number in range(num_holders))
    for bucket in range(5):
        found = makers(bucket, (1 << 17,) * num_slices, holders, twice=twice)
        owned = [
            number for makes in found.values() for number in range(num_slices) if makes.owns >> number & 1
        ]
        made = [
            number for makes in found.values() for number in range(num_slices) if makes.slices >> number & 1
        ]
        assert sorted(owned) == list(range(num_slices))
        assert sorted(made) == sorted(owned * (2 if twice and num_holders > 1 else 1))
        assert all(makes.owns & makes.slices == makes.owns for makes in found.values())


@pytest.mark.parametrize("num_holders", [2, 4, 8])
def test_owners_have_equal_shares_that_lie_together(num_holders: int) -> None:
    holders = tuple(f"n{number}/0" for number in range(num_holders))
    found = makers(1, (1 << 17,) * 64, holders, twice=False)
    share = 64 // num_holders
    ones = (1 << share) - 1
    assert [found[holder].owns for holder in (*holders[1:], holders[0])] == [
        ones << share * number for number in range(num_holders)
    ]


def test_a_small_bucket_has_one_owner_and_the_next_bucket_another_one() -> None:
    small = (1 << 15, 1 << 15, 100)
    assert [makers(bucket, small, ("a", "b"), twice=False) for bucket in range(3)] == [
        {"a": Makes(0b111, 0b111)},
        {"b": Makes(0b111, 0b111)},
        {"a": Makes(0b111, 0b111)},
    ]


def test_slices_of_other_sizes_are_shared_by_numbers() -> None:
    found = makers(0, (1 << 20, 1 << 18, 1 << 18, 1 << 18, 1 << 18), ("a", "b"), twice=False)
    assert (found["a"].owns, found["b"].owns) == (0b1, 0b11110)


def test_a_bucket_without_parameters_has_an_owner() -> None:
    assert makers(3, (0,), ("a", "b"), twice=False) == {"b": Makes(1, 1)}


# ---------------------------------------------------------------- contributing


def test_a_bucket_is_contributed_once_when_all_that_is_owed_to_its_uses_is_counted() -> None:
    exchange = exchange_of(owed={0: {0, 1}, 1: {1}})
    assert exchange.ready() == ()
    done(exchange, {0: {0, 1}})
    assert exchange.ready() == (Contribute(0),)  # it makes the means itself
    assert exchange.ready() == ()
    done(exchange, {1: {1}})
    assert exchange.ready() == (Contribute(1, (("d/0", 1),)), Contribute(2))
    exchange.ledger.excuse(())
    assert exchange.ready() == ()


def test_sums_go_to_those_who_make_means_of_them() -> None:
    everybody = frozenset(HELD)
    shares = {each.bucket: each.shares for each in exchange_of("b/0", live=everybody, numbers=CUT).ready()}
    assert shares == {
        0: (("a/0", 0b0001), ("d/0", 0b1000)),
        2: (("a/0", 0b0100), ("c/0", 0b0001), ("d/0", 0b0010)),
    }
    shares = {
        each.bucket: each.shares
        for each in exchange_of("b/0", live=everybody, numbers=CUT, twice=True).ready()
    }
    assert shares == {
        0: (("a/0", 0b1001), ("d/0", 0b1110)),
        2: (("a/0", 0b0110), ("c/0", 0b1001), ("d/0", 0b0011)),
    }


def test_under_the_next_epoch_it_is_contributed_again_to_those_who_live() -> None:
    exchange = exchange_of(owed={0: {0}}, live=frozenset(HELD))
    done(exchange, {0: {0}})
    assert {each.bucket: each.shares for each in exchange.ready()} == {
        0: (),
        1: (("c/0", 1),),
        2: (("c/0", 1),),
    }
    exchange.enter(4, LAYOUT, TWO, NO_DONORS)
    assert exchange.ready() == (Contribute(0), Contribute(1, (("d/0", 1),)), Contribute(2))
    assert exchange.ready() == ()


def test_nothing_is_contributed_between_the_answer_to_a_report_and_the_decision() -> None:
    exchange = exchange_of(owed={0: {0}})
    exchange.open = False
    done(exchange, {0: {0}})
    assert exchange.ready() == ()
    exchange.enter(4, LAYOUT, TWO, NO_DONORS)
    assert len(exchange.ready()) == 3


def test_a_redundant_holder_contributes_nothing_at_once_and_may_own_what_it_has_not_computed() -> None:
    exchange = exchange_of()
    ready = {each.bucket for each in exchange.ready()}
    assert ready == {0, 1, 2}
    empty = own(exchange, 0)
    assert empty.is_empty
    assert exchange.hear(0, "a/0", empty) is None
    assert exchange.hear(0, "d/0", part(0, 1, 2, 3)) == Give(0, 1, ("d/0",))
    assert exchange.reduced[0].ledgers["d/0"] == {0: (0, 1, 2, 3)}


def test_who_holds_nothing_takes_no_part() -> None:
    exchange = exchange_of("e/0")
    assert (exchange.ready(), exchange.complete, exchange.shared) == ((), True, [])
    assert not exchange.wants(0, "a/0")
    assert not exchange.wants_means(0, "a/0")


# ---------------------------------------------------------------- making means


def test_with_the_last_contribution_means_are_made_and_given_to_the_other_holders() -> None:
    exchange = exchange_of(live=frozenset({"a/0", "b/0", "d/0"}))
    assert exchange.hear(0, "d/0", part(0, 3)) is None
    assert exchange.hear(0, "a/0", part(2)) is None
    assert 0 not in exchange.reduced
    assert exchange.hear(0, "b/0", part(1)) == Give(0, 1, ("b/0", "d/0"))
    losses = {mb: float(mb) for mb in range(4)}
    assert exchange.reduced[0] == exchange.of_means(0, 1)
    assert exchange.reduced[0] == Given(1, {"a/0": {0: (2,)}, "b/0": {0: (1,)}, "d/0": {0: (0, 3)}}, losses)
    assert not exchange.complete


def test_the_second_maker_is_given_nothing_and_gives_nothing() -> None:
    three = frozenset({"a/0", "b/0", "d/0"})
    for device, gives in (("a/0", Give(0, 1, ("d/0",))), ("b/0", Give(0, 0, ()))):
        exchange = exchange_of(device, live=three, twice=True)
        assert exchange.hear(0, "d/0", part(0, 3)) is None
        assert exchange.hear(0, "a/0", part(2)) is None
        assert exchange.hear(0, "b/0", part(1)) == gives
        assert (0 in exchange.reduced, exchange.made_by_now(0)) == (True, 1)
        assert not exchange.wants_means(0, "a/0")
    third = exchange_of("d/0", live=three, twice=True)
    assert not third.wants(0, "a/0")
    third.hear_means(0, "a/0", given(a=(2,), b=(1,), d=(0, 3)))
    assert (0 in third.reduced, third.made_by_now(0)) == (True, 0)


def test_a_bucket_is_reduced_when_the_means_of_all_its_slices_are_here() -> None:
    three = frozenset({"a/0", "b/0", "d/0"})
    exchange = exchange_of(live=three, numbers=CUT)
    ledgers = {"a": (2,), "b": (1,), "d": (0, 3)}
    exchange.hear_means(0, "d/0", given(0b1000, **ledgers))
    for device, counted in ledgers.items():
        assert exchange.told == {0: (0b1000, 0b1111)}
        gives = exchange.hear(0, f"{device}/0", part(*counted))
    assert gives == Give(0, 0b0001, ("b/0", "d/0"))
    assert (exchange.told, 0 in exchange.reduced) == ({0: (0b1001, 0b1111)}, False)
    exchange.hear_means(0, "b/0", given(0b0110, **ledgers))
    assert (exchange.told, 0 in exchange.reduced) == ({0: (0b1111, 0b1111)}, True)
    assert exchange.made_by_now(0) == 0b0001


@pytest.mark.parametrize(
    ("slices", "ledgers"),
    [
        (0b0011, {"a": (0, 1), "d": (2, 3)}),  # it owns others
        (0b1100, {"a": (0, 1), "d": (2,)}),  # a micro-batch is missing
        (0b1100, {"a": (0, 1), "d": (1, 2, 3)}),  # one is in it twice
    ],
)
def test_means_that_cannot_be_right_are_refused(slices: int, ledgers: dict[str, tuple[int, ...]]) -> None:
    exchange = exchange_of(numbers=CUT)
    with pytest.raises(AssertionError):
        exchange.hear_means(0, "d/0", given(slices, **ledgers))
    assert exchange.told == {}


def test_means_are_wanted_once_and_of_their_owner_alone() -> None:
    exchange = exchange_of(numbers=CUT, live=frozenset(HELD))
    assert exchange.makers[0]["a/0"] == Makes(0b0001, 0b0001)
    for giver in ("a/0", "c/0", "x/0"):  # itself; holds another layer; of no layout
        assert not exchange.wants_means(0, giver)
        with pytest.raises(AssertionError):
            exchange.hear_means(0, giver, given(0b0001, a=(0, 1, 2, 3)))
    assert not exchange.wants_means(9, "d/0")
    exchange.hear_means(0, "d/0", given(0b1000, a=(0, 1, 2, 3)))
    assert not exchange.wants_means(0, "d/0")
    with pytest.raises(AssertionError):
        exchange.hear_means(0, "d/0", given(0b1000, a=(0, 1, 2, 3)))


def test_what_was_reduced_with_a_wrong_sum_is_made_anew_under_the_next_epoch() -> None:
    exchange = exchange_of(owed={0: {0, 1}})
    done(exchange, {0: {0, 1}})
    exchange.ready()
    for device, what in (("a/0", own(exchange, 0)), ("d/0", part(2, 3))):
        exchange.hear(0, device, what)
    exchange.forget(0)
    assert (exchange.reduced, exchange.ready(), exchange.wants(0, "d/0")) == ({}, (), False)
    assert exchange.told == {}
    exchange.enter(4, LAYOUT, TWO, NO_DONORS)
    assert Contribute(0) in exchange.ready()
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
    exchange = exchange_of("c/0", live=frozenset({"b/0", "c/0", "a/0"}))
    exchange.hear(2, "a/0", Contribution({0: (), 1: ()}))
    exchange.hear(2, "b/0", part(*everything, use=0))
    exchange.hear(2, "c/0", part(*everything, use=1))
    assert exchange.reduced[2].ledgers == {
        "a/0": {0: (), 1: ()},
        "b/0": {0: everything},
        "c/0": {1: everything},
    }


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
    exchange.hear(2, "d/0", part(2, 3, use=1))
    exchange.enter(4, LAYOUT, TWO, NO_DONORS)
    assert not exchange.wants(0, "d/0")
    assert exchange.wants(2, "d/0")
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


def test_a_round_that_evaluates_has_one_bucket_whose_losses_come_from_the_owner() -> None:
    exchange = exchange_of(owed={0: {0}, 1: {0}}, numbers=CUT, twice=True)
    exchange.begin(6, Ledger.of((0, 1)), (4, 4), num_evaluated=3)
    exchange.enter(3, LAYOUT, frozenset(HELD), NO_DONORS)
    assert (exchange.held, exchange.holders) == ({0: (1,)}, {0: ("a/0", "c/0", "d/0")})
    assert exchange.ready() == (Contribute(0),)
    exchange.hear(0, "a/0", part(0, use=1))
    exchange.hear(0, "c/0", part(2, use=1))
    assert exchange.hear(0, "d/0", part(1, use=1)) == Give(0, 1, ("c/0", "d/0"))
    assert (exchange.reduced[0].losses, exchange.complete) == ({0: 0.0, 1: 1.0, 2: 2.0}, True)
    other = exchange_of("c/0")
    other.begin(6, Ledger.of((1,)), (4, 4), num_evaluated=3)
    other.enter(3, LAYOUT, frozenset(HELD), NO_DONORS)
    assert other.ready() == (Contribute(0, (("a/0", 1),)),)
    other.hear_means(0, "a/0", exchange.of_means(0, 1))
    assert (other.reduced[0].losses, other.complete) == (exchange.reduced[0].losses, True)


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


def test_a_donor_gives_the_means_and_its_peers_take_those_and_nothing_else() -> None:
    donors = {0: {"d/0": 1}}
    taking = exchange_of(owed={0: {0}}, donors=donors)
    done(taking, {0: {0}})
    assert 0 not in {each.bucket for each in taking.ready()}
    assert not taking.wants(0, "a/0")
    assert not taking.wants(0, "d/0")
    means = given(a=(0, 1), d=(2, 3))
    taking.hear_means(0, "d/0", means)
    assert taking.reduced[0] == means
    assert taking.made_by_now(0) == 0

    giving = exchange_of("d/0", live=TWO | {"b/0"})
    giving.hear_means(0, "a/0", given(a=(0, 1), b=(), d=(2, 3)))
    giving.enter(4, LAYOUT, TWO, donors)
    assert Give(0, 1, ("a/0",)) in giving.ready()
    assert giving.of_means(0, 1) == given(a=(0, 1), b=(), d=(2, 3))
    assert not giving.wants_means(0, "a/0")


def test_two_donors_give_what_each_has_and_take_what_it_has_not() -> None:
    """The owner of a third of the slices has died; one has given its means to one, one to the other."""
    three, two = frozenset({"a/0", "b/0", "d/0"}), frozenset({"b/0", "d/0"})
    ledgers = {"a": (0, 1), "b": (2,), "d": (3,)}
    one, other = (exchange_of(device, live=three, numbers=CUT) for device in ("b/0", "d/0"))
    one.hear_means(0, "a/0", given(0b0001, **ledgers))
    one.hear_means(0, "d/0", given(0b1000, **ledgers))
    for device, counted in ledgers.items():
        other.hear(0, f"{device}/0", part(*counted))
    other.hear_means(0, "b/0", given(0b0110, **ledgers))
    assert (one.told, other.told) == ({0: (0b1001, 0b1111)}, {0: (0b1110, 0b1111)})

    donors = {0: {"b/0": 0b0001, "d/0": 0b1110}}
    for exchange in (one, other):
        exchange.enter(4, LAYOUT, two, donors)
    assert (one.told, other.told) == ({0: (0b0001, 0b1111)}, {0: (0b1110, 0b1111)})
    assert [each for each in one.ready() if each.bucket == 0] == [Give(0, 0b0001, ("d/0",))]
    assert [each for each in other.ready() if each.bucket == 0] == [Give(0, 0b1110, ("b/0",))]
    one.hear_means(0, "d/0", other.of_means(0, 0b1110))
    other.hear_means(0, "b/0", one.of_means(0, 0b0001))
    assert 0 in one.reduced
    assert 0 in other.reduced


def test_means_of_a_part_are_made_anew_where_nobody_has_the_rest() -> None:
    exchange = exchange_of(live=frozenset({"a/0", "b/0", "d/0"}), numbers=CUT)
    exchange.hear_means(0, "d/0", given(0b1000, a=(0, 1), b=(2,), d=(3,)))
    exchange.enter(4, LAYOUT, TWO, NO_DONORS)
    assert exchange.told == {}
    assert exchange.wants(0, "a/0")
    assert exchange.wants_means(0, "d/0")


def test_a_donor_s_means_are_looked_at_as_all_others_are() -> None:
    exchange = exchange_of(donors={0: {"d/0": 1}})
    with pytest.raises(AssertionError):
        exchange.hear_means(0, "d/0", given(a=(0, 1), d=(2,)))


def test_nobody_can_give_what_it_has_not() -> None:
    exchange = exchange_of("d/0")
    with pytest.raises(AssertionError, match="not here"):
        exchange.enter(4, LAYOUT, TWO, {0: {"d/0": 1}})
