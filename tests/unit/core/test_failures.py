"""How often a job loses nodes, as its history has it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleckd.core.failures import PRIOR_S, RECENT, mean_between_s, rough


def test_without_a_loss_it_is_a_guess_that_grows_with_time():
    assert mean_between_s([], 0.0, 0.0) == PRIOR_S
    assert mean_between_s([], 0.0, 10 * PRIOR_S) == 10 * PRIOR_S


@pytest.mark.parametrize("every_s", [60.0, 600.0, 86400.0])
def test_after_some_losses_it_is_what_was_seen(every_s: float):
    losses = [every_s * (n + 1) for n in range(60)]
    found = mean_between_s(losses, 0.0, losses[-1])
    assert found == pytest.approx(every_s, rel=0.2)
    assert mean_between_s(losses[:5], 0.0, losses[4]) == pytest.approx(every_s, rel=0.8)
    assert mean_between_s(losses[:1], 0.0, losses[0]) != pytest.approx(PRIOR_S, rel=0.3)


def test_as_long_as_it_was_quiet_it_may_stay_so():
    """Losses come in bursts; after one a mean over the last losses would grow by a twentieth of the quiet
    time only.
    """
    burst = [60.0 * n for n in range(RECENT + 1)]
    assert mean_between_s(burst, 0.0, burst[-1]) < 100.0
    assert mean_between_s(burst, 0.0, burst[-1] + 50.0) < 100.0
    assert mean_between_s(burst, 0.0, burst[-1] + 1000.0) == 1000.0


def test_what_is_long_past_does_not_count():
    calm_then_stormy = [1e6, *(2e6 + 600.0 * n for n in range(RECENT + 1))]
    stormy = [600.0 * n for n in range(RECENT + 1)]
    later = mean_between_s(calm_then_stormy, 0.0, calm_then_stormy[-1])
    assert later == pytest.approx(mean_between_s(stormy, 0.0, stormy[-1]))


@given(st.floats(1e-6, 1e12))
def test_rough_is_near_and_changes_rarely(value: float):
    near = rough(value)
    assert 0.6 <= near / value <= 1.7
    assert rough(near) == pytest.approx(near)


def test_nothing_is_nothing():
    assert rough(0.0) == 0.0
    assert rough(-1.0) == 0.0
