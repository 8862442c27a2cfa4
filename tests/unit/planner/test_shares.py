"""Which micro-batches each pipeline has: blocks, or dealt out in turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oobleckd.planner.sizing.shares import blocks_of, dealt_out


def test_blocks_follow_each_other() -> None:
    assert blocks_of((3, 2, 0, 1)) == ((0, 1, 2), (3, 4), (), (5,))


def test_equal_shares_take_turns() -> None:
    assert dealt_out((3, 3)) == ((0, 2, 4), (1, 3, 5))
    assert dealt_out((2, 4)) == ((1, 4), (0, 2, 3, 5))
    assert dealt_out((0, 2)) == ((), (0, 1))
    assert dealt_out(()) == ()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_all_are_dealt_once_and_the_first_are_shared_as_all_are(shares: list[int]) -> None:
    found, total = dealt_out(shares), sum(shares)
    assert [len(hand) for hand in found] == shares
    assert sorted(mb for hand in found for mb in hand) == list(range(total))
    for hand, share in zip(found, shares, strict=True):
        assert list(hand) == sorted(hand)
        for first in range(total + 1):
            have = sum(mb < first for mb in hand)
            assert abs(have - share * first / total) < 1.5 if total else not have
