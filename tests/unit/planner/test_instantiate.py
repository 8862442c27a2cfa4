"""Instantiation against brute force and the reference; fewer micro-batches than pipelines."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.planner.plan import Template
from oobleckd.planner.policy import PlanError
from oobleckd.planner.sizing import sizes
from oobleckd.planner.sizing.instantiate import instantiate, slowest_s, split_micro_batches
from oobleckd.planner.templates.guarantee import max_pipelines, max_usable
from tests.unit.planner.build import REFERENCE, bare_template, multisets

TIMES = st.tuples(st.integers(1, 40), st.integers(1, 20)).map(lambda t: (t[0] / 8, t[1] / 8))


@st.composite
def template_sets(draw: st.DrawFn) -> list[Template]:
    n0 = draw(st.integers(1, 4))
    times = draw(st.lists(TIMES, min_size=1, max_size=5))
    return [bare_template(n0 + k, fill_s, period_s) for k, (fill_s, period_s) in enumerate(times)]


@settings(max_examples=200, deadline=None)
@given(template_sets(), st.integers(0, 14), st.integers(0, 3), st.integers(1, 12))
def test_against_every_multiset_of_sizes(made: list[Template], more: int, f: int, m: int):
    by_size = {t.num_nodes: t for t in made}
    n0, largest = min(by_size), max(by_size)
    num_nodes = n0 + more
    used = max_usable(num_nodes, n0, largest)
    r = max_pipelines(num_nodes, n0, f)
    admissible = [sizes for sizes in multisets(used, n0, largest) if len(sizes) >= r]
    busy = [sizes for sizes in admissible if len(sizes) <= m]
    best_s = min(
        slowest_s(members, split_micro_batches(members, m))
        for members in ([by_size[size] for size in sizes] for sizes in busy or admissible)
    )
    found = instantiate(made, num_nodes, f, m)
    assert found.sizes in admissible
    assert found.idle == num_nodes - used
    assert sum(found.shares) == m
    assert not busy or min(found.shares) >= 1
    assert found.step_s == pytest.approx(best_s)


@settings(max_examples=100, deadline=None)
@given(st.lists(TIMES, min_size=1, max_size=3), st.integers(1, 8))
def test_splits_against_every_split(times: list[tuple[float, float]], m: int):
    members = [bare_template(1, *time) for time in times]
    shares = split_micro_batches(members, m)
    least = 1 if m >= len(members) else 0
    every = (s for s in itertools.product(range(least, m + 1), repeat=len(members)) if sum(s) == m)
    assert sum(shares) == m
    assert min(shares) >= least
    assert slowest_s(members, shares) == pytest.approx(min(slowest_s(members, s) for s in every))


@pytest.mark.parametrize("case", REFERENCE["instantiation"], ids=lambda case: f"{case['nodes']} nodes")
def test_reference_optima(case: dict):
    made = [bare_template(*row) for row in case["templates"]]
    found = instantiate(made, case["nodes"], case["f"], case["micro_batches"])
    assert found.step_s == pytest.approx(case["step_s"], rel=1e-6)
    assert sum(size * count for size, count in found.counts.items()) == case["nodes"]
    assert sum(found.shares) == case["micro_batches"]


def test_equal_pipelines_share_evenly_and_the_first_take_the_rest():
    assert split_micro_batches([bare_template(2, 1.0, 0.5)] * 3, 8) == (3, 3, 2)


def test_fewer_micro_batches_than_pipelines_leaves_some_with_copies_only():
    found = instantiate([bare_template(1, 1.0, 1.0)], 4, 3, 2)
    assert (found.sizes, sorted(found.shares)) == ((1, 1, 1, 1), [0, 0, 1, 1])


def test_more_copies_win_a_tie():
    made = [bare_template(1, 1.0, 1.0), bare_template(2, 1.0, 0.5)]
    assert instantiate(made, 4, 0, 4).sizes == (1, 1, 1, 1)


def test_more_pipelines_than_micro_batches_at_any_rate_leave_some_with_copies_only():
    made = [bare_template(size, 1.0 + size / 100, 1.0 / size) for size in (1, 2, 3)]
    found = instantiate(made, 3000, 1, 200)
    assert (sum(found.sizes), sum(found.shares)) == (3000, 200)


@settings(max_examples=100, deadline=None)
@given(template_sets(), st.integers(0, 40), st.integers(0, 3), st.integers(1, 12))
def test_trying_numbers_of_pipelines_is_as_good_as_the_table(made: list[Template], more: int, f: int, m: int):
    num_nodes = made[0].num_nodes + more
    by_table = instantiate(made, num_nodes, f, m)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "LARGEST_TABLE", 0)
        tried = instantiate(made, num_nodes, f, m)
    assert tried.step_s == pytest.approx(by_table.step_s)
    assert (sum(tried.sizes), min(tried.shares) > 0) == (sum(by_table.sizes), min(by_table.shares) > 0)


def test_every_pipeline_is_busy_where_a_table_would_be_too_large():
    made = [bare_template(size, 1.0 + size / 100, 1.0 / size) for size in range(1, 31)]
    found = instantiate(made, 3000, 1, 200)
    assert (sum(found.sizes), sum(found.shares), min(found.shares)) == (3000, 200, 1)
    assert found.step_s == pytest.approx(made[14].time_s(1)), "200 pipelines of 15 nodes, one each"


def test_fewer_pipelines_where_the_all_reduce_is_dear():
    made = [bare_template(size, 1.0, 1.0 / size) for size in (1, 2, 3, 4)]
    assert len(instantiate(made, 12, 0, 24, [0.0] * 13).sizes) == 12
    found = instantiate(made, 12, 0, 24, [0.0] + [float(c) for c in range(1, 13)])
    assert (found.sizes, found.shares) == ((4, 4, 4), (8, 8, 8))
    assert found.step_s == pytest.approx(1.0 + 7 / 4 + 3.0)


def test_below_n0_the_error_says_how_many_nodes_are_missing():
    with pytest.raises(PlanError, match="2 usable nodes, and the model needs 3") as caught:
        instantiate([bare_template(3, 1.0, 1.0)], 2, 1, 4)
    assert "add 1 or more nodes" in caught.value.hint


def test_nodes_idle_only_where_sizes_cannot_sum_up_to_them():
    made = [bare_template(5, 1.0, 0.2), bare_template(6, 1.0, 0.2)]
    found = instantiate(made, 9, 1, 4)
    assert (found.sizes, found.idle) == ((6,), 3)
