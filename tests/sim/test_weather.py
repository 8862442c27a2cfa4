"""A bad network, slow and stopped processes, a daemon that dies: whatever the weather, nothing is lost and
nothing is stuck.

A failing seed repeats with the command that the failure prints.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.helpers import weather
from tests.helpers.hazards import KINDS
from tests.helpers.manners import MANNERS
from tests.helpers.weather import Seen

SEEDS = 200
seen = Seen(Counter())


@pytest.mark.thin(9)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_weather(seed: int) -> None:
    try:
        seen.add(weather.run(weather.forecast(seed)))
    except weather.VIOLATIONS as error:
        raise AssertionError(f"{error}\nrepeat with: {weather.command(seed)}") from error


@pytest.mark.parametrize("seed", [1175, 1722, 1750, 2551, 3104, 8744, 9425, 20278])
def test_weather_that_was_too_much(seed: int) -> None:
    """A Release that came late and took copies along; a Resume that was missed; one that was cut off and went
    on in a history that was over; two that were given up, and back, before a daemon that had just started
    looked at anybody; a job that was over while its last evaluation was still on its way to the journal.
    """
    test_weather(seed)


def test_everything_happens() -> None:
    """Seeds that are drawn strike in every manner, with everything."""
    drawn = [weather.forecast(seed) for seed in range(SEEDS)]
    assert {forecast.manner for forecast in drawn} == set(MANNERS)
    assert {fault.kind for forecast in drawn for fault in forecast.faults} == set(KINDS)


def test_a_seed_repeats_exactly() -> None:
    for seed in (3, 4):
        first, second = (weather.run(weather.forecast(seed)) for _ in range(2))
        assert first == second


def test_what_a_failure_takes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all faults of a run only those are left without which it does not fail."""
    forecast = next(
        found
        for found in map(weather.forecast, range(SEEDS))
        if {"join", "kill"} <= {fault.kind for fault in found.faults} and len(found.faults) > 4
    )

    def run(_: weather.Weather, without: set[int] = frozenset()) -> None:
        kinds = [f.kind for number, f in enumerate(forecast.faults) if number not in without]
        assert "kill" not in kinds, "planted"

    monkeypatch.setattr(weather, "run", run)
    assert [fault.kind for fault in weather.smallest(forecast)] == ["kill"]
