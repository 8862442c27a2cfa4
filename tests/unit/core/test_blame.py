"""Who is to blame for wrong bits: by majority, by recomputation, by being there too often."""

from oobleckd.core import blame
from oobleckd.core.blame import Dispute
from oobleckd.protocol import corruption
from oobleckd.protocol.corruption import Fingerprints, Odd
from oobleckd.protocol.parts import Vote


def odd(bucket: int = 0, **said: int) -> Odd:
    return Odd("state", bucket, {f"{name}/0": value for name, value in said.items()})


def test_more_than_half_name_the_others() -> None:
    assert blame.outvoted([odd(a=1, b=1, c=2)]) == ("c/0",)
    assert blame.outvoted([odd(a=1, b=1, c=1, d=2, e=3)]) == ("d/0", "e/0")
    assert blame.outvoted([odd(0, a=1, b=1, c=2), odd(1, a=5, b=6, c=6)]) == ("a/0", "c/0")


def test_half_is_no_majority() -> None:
    assert blame.outvoted([odd(a=1, b=2)]) == ()
    assert blame.outvoted([odd(a=1, b=1, c=2, d=2)]) == ()
    assert blame.outvoted([odd(a=1, b=2, c=3)]) == ()


def test_what_comes_out_again_names_who_had_something_else() -> None:
    dispute = Dispute(7, (odd(3, a=1, b=2),))
    assert blame.refuted(dispute, Fingerprints({3: 1}, {})) == ("b/0",)
    assert blame.refuted(dispute, Fingerprints({3: 2}, {})) == ("a/0",)


def test_nobody_is_named_where_all_were_wrong_or_nothing_is_known() -> None:
    dispute = Dispute(7, (odd(3, a=1, b=2),))
    assert blame.refuted(dispute, Fingerprints({3: 9}, {})) == ()
    assert blame.refuted(dispute, Fingerprints({}, {3: 1})) == ()


def test_who_is_in_too_many_disputes_is_suspected() -> None:
    two = [Dispute(step, (odd(0, a=1, b=2),)) for step in range(2)]
    assert blame.suspected(two) == ()
    assert blame.suspected([*two, Dispute(5, (odd(1, a=1, c=2),))]) == ("a/0",)


def test_votes_that_agree_have_no_odds() -> None:
    votes = {"a/0": Vote({0: (1.0,)}, {}, digests={0: 1}), "b/0": Vote({0: (1.0,)}, {}, digests={0: 1})}
    assert corruption.agree(votes)
    assert corruption.odds(votes) == ()


def test_odds_say_who_said_what() -> None:
    votes = {
        "a/0": Vote({0: (1.0,), 1: (2.0,)}, {}, digests={0: 1, 1: 4}),
        "b/0": Vote({0: (1.0,), 1: (2.5,)}, {}, digests={0: 2, 1: 4}),
    }
    assert not corruption.agree(votes)
    state, gradients = corruption.odds(votes)
    assert state == Odd("state", 0, {"a/0": 1, "b/0": 2})
    assert (gradients.what, gradients.bucket) == ("gradients", 1)
    assert gradients.said["a/0"] == corruption.of_numbers((2.0,))


def test_norms_of_a_round_with_a_nan_mean_nothing() -> None:
    votes = {"a/0": Vote({0: (1.0,)}, {}, nan=True), "b/0": Vote({0: (2.0,)}, {})}
    assert corruption.agree(votes)
    assert corruption.odds(votes) == ()
