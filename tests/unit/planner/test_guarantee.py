"""The five statements: against brute force over all multisets of sizes, and as properties of any sizes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleckd.planner.plan import Range
from oobleckd.planner.templates import guarantee
from tests.unit.planner.build import REFERENCE, multisets


def brute_usable(num_nodes: int, n0: int, n_max: int, r: int) -> bool:
    return any(len(sizes) >= r for sizes in multisets(num_nodes, n0, n_max))


def smallest(holds, start: int) -> int:
    return next(n for n in itertools.count(start) if holds(n))


@pytest.mark.parametrize("n0", [1, 2, 3, 4])
def test_statement_1_usable(n0: int):
    for n_max, num_nodes, r in itertools.product(range(n0, n0 + 5), range(1, 17), range(1, 5)):
        assert guarantee.usable(num_nodes, n0, n_max, r) == brute_usable(num_nodes, n0, n_max, r)


@pytest.mark.parametrize(("n0", "f"), list(itertools.product([1, 2, 3, 4], [0, 1, 2])))
def test_statement_2_f_plus_1_pipelines(n0: int, f: int):
    for num_nodes in range((f + 1) * n0, (f + 1) * n0 + 9):
        wanted = range((f + 1) * n0, num_nodes + 1)
        expected = smallest(
            lambda top, wanted=wanted: all(guarantee.usable(n, n0, top, f + 1) for n in wanted), n0
        )
        assert max(n0, guarantee.n_max_for_f(n0, f, num_nodes)) == expected
        plans = [sizes for sizes in multisets(num_nodes, n0, num_nodes) if len(sizes) >= f + 1]
        assert guarantee.largest_useful(n0, f, num_nodes) == max(map(max, plans))


@pytest.mark.parametrize(("n0", "f"), list(itertools.product([1, 2, 3, 4, 5], [0, 1, 2])))
def test_statement_3_down_to_n0(n0: int, f: int):
    for num_nodes in range(n0, 16):
        wanted = [(n, guarantee.max_pipelines(n, n0, f)) for n in range(n0, num_nodes + 1)]
        expected = smallest(
            lambda top, wanted=wanted: all(guarantee.usable(n, n0, top, r) for n, r in wanted), n0
        )
        assert guarantee.n_max_down_to_n0(n0, num_nodes) == expected


def test_statement_3_needs_more_than_the_largest_useful_size():
    assert guarantee.largest_useful(5, 1, 11) == 6
    assert [n for n in range(5, 12) if not guarantee.usable(n, 5, 6, guarantee.max_pipelines(n, 5, 1))] == [
        7,
        8,
        9,
    ]
    assert guarantee.n_max(5, 1, 11, 50) == 9


def test_statement_4_layers_bound_the_sizes():
    assert guarantee.n_max(5, 1, 11, 7) == 7
    for n0, n_max, num_nodes in itertools.product([1, 2, 3, 5], range(5, 8), range(1, 18)):
        expected = max((n for n in range(num_nodes + 1) if n and brute_usable(n, n0, n_max, 1)), default=0)
        assert guarantee.max_usable(num_nodes, n0, n_max) == expected


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """n0, n_max, f, number of nodes >= n0."""
    n0 = draw(st.integers(1, 30))
    return n0, draw(st.integers(n0, 3 * n0)), draw(st.integers(0, 6)), draw(st.integers(n0, 12 * n0))


@given(sizes(), st.integers(1, 9))
def test_statement_1_is_that_some_count_of_pipelines_spans_the_nodes(case: tuple[int, ...], r: int):
    n0, n_max, _, num_nodes = case
    spans = (k * n0 <= num_nodes <= k * n_max for k in range(r, num_nodes + 1))
    assert guarantee.usable(num_nodes, n0, n_max, r) == any(spans)


@given(sizes())
def test_statement_2_is_an_equivalence(case: tuple[int, ...]):
    n0, n_max, f, num_nodes = case
    wanted = range((f + 1) * n0, num_nodes + 1)
    if not wanted:
        return
    everywhere = all(guarantee.usable(n, n0, n_max, f + 1) for n in wanted)
    assert everywhere == (n_max >= guarantee.n_max_for_f(n0, f, num_nodes))
    assert guarantee.largest_useful(n0, f, num_nodes) >= guarantee.n_max_for_f(n0, f, num_nodes)


@given(sizes())
def test_statement_3_is_an_equivalence(case: tuple[int, ...]):
    n0, n_max, f, num_nodes = case
    wanted = [(n, guarantee.max_pipelines(n, n0, f)) for n in range(n0, num_nodes + 1)]
    everywhere = all(guarantee.usable(n, n0, n_max, r) for n, r in wanted)
    assert everywhere == (n_max >= guarantee.n_max_down_to_n0(n0, num_nodes))


@given(sizes())
def test_statement_4_names_every_number_at_which_nodes_idle(case: tuple[int, ...]):
    n0, n_max, _, num_nodes = case
    idle = [n for gap in guarantee.idle_ranges(num_nodes, n0, n_max) for n in gap]
    assert idle == [n for n in range(n0, num_nodes + 1) if guarantee.max_usable(n, n0, n_max) < n]
    assert (idle == []) == (n_max >= guarantee.n_max_down_to_n0(n0, num_nodes))


def test_the_guarantee_of_a_job():
    whole = guarantee.guarantee(num_nodes=11, n0=5, n_max=7, f=1)
    assert whole == guarantee.Guarantee(
        num_pipelines=2, can_lose=1, full_down_to=10, waits_below=5, idle=(range(8, 10),)
    )
    assert guarantee.guarantee(num_nodes=11, n0=5, n_max=9, f=1).idle == ()
    assert guarantee.guarantee(num_nodes=9, n0=5, n_max=9, f=1).can_lose == 0


def test_a_replan_needs_n0_nodes_and_a_holder_of_every_layer():
    held = [Range(0, 2), Range(0, 2), Range(3, 4)]
    assert guarantee.lost_layers(held, 4) == (2,)
    assert guarantee.lost_layers([*held, Range(1, 3)], 4) == ()
    assert not guarantee.can_replan(3, 2, held, 4)
    assert guarantee.can_replan(4, 2, [*held, Range(1, 3)], 4)
    assert not guarantee.can_replan(1, 2, [Range(0, 4)], 4)


def test_statement_5_one_copy_must_be_left():
    assert [guarantee.losses_survived(c) for c in (1, 2, 4)] == [0, 1, 3]


def test_n_max_is_at_least_n0_even_with_fewer_nodes():
    assert guarantee.n_max(4, 1, 2, 10) == 4


@pytest.mark.parametrize("row", REFERENCE["guarantee"])
def test_reference(row: list[int]):
    n0, f, num_nodes, for_f, down_to_n0, useful = row
    assert guarantee.n_max_for_f(n0, f, num_nodes) == for_f
    assert guarantee.n_max_down_to_n0(n0, num_nodes) == down_to_n0
    assert guarantee.largest_useful(n0, f, num_nodes) == useful
