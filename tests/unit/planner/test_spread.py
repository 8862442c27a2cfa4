"""Senders of copies: the busiest link is as little busy as any choice makes it, own nodes need none."""

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.placement.spread import Copy, spread
from oobleckd.planner.plan import node_of


def copy_to(target: str, num_bytes: int, *holders: str) -> Copy:
    nodes: dict[str, tuple[str, ...]] = {}
    for holder in sorted(holders):
        nodes[node_of(holder)] = (*nodes.get(node_of(holder), ()), holder)
    return Copy(target, num_bytes, nodes)


def busiest(copies: list[Copy], senders: tuple[str, ...] | list[str]) -> int:
    """Bytes over the busiest link, in either direction."""
    sent, received = Counter[str](), Counter[str]()
    for copy, sender in zip(copies, senders, strict=True):
        if node_of(sender) != node_of(copy.target):
            sent[node_of(sender)] += copy.num_bytes
            received[node_of(copy.target)] += copy.num_bytes
    return max([0, *sent.values(), *received.values()])


@st.composite
def copying(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> list[Copy]:
    holders = st.lists(
        st.sampled_from(["a/0", "a/1", "b/0", "c/0", "d/0"]), min_size=1, max_size=3, unique=True
    )
    targets = st.sampled_from(["a/2", "x/0", "y/0", "z/0"])
    rows = draw(st.lists(st.tuples(targets, sizes, holders), max_size=7))
    return [copy_to(target, size, *devices) for target, size, devices in rows]


def least(copies: list[Copy]) -> int:
    devices = [[d for devices in copy.holders.values() for d in devices] for copy in copies]
    return min(busiest(copies, senders) for senders in itertools.product(*devices))


@settings(max_examples=100, deadline=None)
@given(copying(st.just(10)))
def test_equal_copies_are_spread_as_well_as_can_be(copies: list[Copy]):
    assert busiest(copies, spread(copies)) == least(copies)


@settings(max_examples=100, deadline=None)
@given(copying(st.integers(1, 30)))
def test_unequal_copies_are_sent_by_holders_and_own_nodes_first(copies: list[Copy]):
    senders = spread(copies)
    for copy, sender in zip(copies, senders, strict=True):
        assert sender in copy.holders[node_of(sender)]
        assert (node_of(sender) == node_of(copy.target)) == (node_of(copy.target) in copy.holders)
    assert busiest(copies, senders) <= 2 * least(copies)
    assert senders == spread(copies)


def test_the_busiest_sender_is_relieved():
    # By turns a, b and a again; then a hands one on to d.
    copies = [
        copy_to("x/0", 10, "a/0", "d/0"),
        copy_to("y/0", 10, "b/0", "c/0"),
        copy_to("z/0", 10, "a/0", "b/0"),
    ]
    assert spread(copies) == ["d/0", "b/0", "a/0"]


def test_devices_of_a_node_take_turns():
    copies = [copy_to("x/0", 10, "a/0", "a/1") for _ in range(4)]
    assert spread(copies) == ["a/0", "a/1", "a/0", "a/1"]


def test_nothing_to_send():
    assert spread([]) == []
    assert spread([copy_to("a/0", 5, "a/1")]) == ["a/1"]
