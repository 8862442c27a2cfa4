"""The round machine, model-checked as it runs in production: every interleaving of three devices and their
deaths.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oobleckd.worker.round_machine.copies import Fate, SumCopies
from tests.helpers import plants
from tests.helpers.commit_model import Device, Violation, explore
from tests.helpers.commit_states import (
    A_REDUNDANT_HEAD,
    REPLICATED_AND_NOT,
    REPLICATED_IN_SLICES,
    THE_HEAD_TWICE,
    THREE_OF_TWO_SLICES,
    THREE_REPLICAS,
    WITH_A_REDUNDANT_LAYER,
    Evaluations,
    Staggered,
    Topology,
)

UPDATES = {
    "flushed": Staggered(),
    "staggered": Staggered(on=True),
    "staggered in vain": Staggered(on=True, through=False),
}


@pytest.mark.parametrize(
    ("topology", "update", "go_on"),
    [
        (REPLICATED_AND_NOT, "staggered", True),
        (REPLICATED_AND_NOT, "flushed", False),
        (WITH_A_REDUNDANT_LAYER, "flushed", True),
        (WITH_A_REDUNDANT_LAYER, "staggered", False),
        (WITH_A_REDUNDANT_LAYER, "staggered in vain", True),
    ],
)
def test_no_interleaving_of_two_steps_and_one_death_breaks_the_rule(
    topology: Topology, update: str, go_on: bool
) -> None:
    states, ends = explore(1, 2, topology, go_on=go_on, staggered=UPDATES[update])
    assert states > 40_000
    assert ends > 100


def test_no_interleaving_of_one_step_and_two_deaths_breaks_the_rule() -> None:
    states, ends = explore(2, 1, THREE_OF_TWO_SLICES)
    assert states > 50_000
    assert ends > 10


@pytest.mark.parametrize(
    ("topology", "update", "go_on", "twice"),
    [
        (THREE_OF_TWO_SLICES, "flushed", False, False),
        (THREE_OF_TWO_SLICES, "flushed", True, True),
        (REPLICATED_IN_SLICES, "staggered", True, True),
        (REPLICATED_IN_SLICES, "staggered in vain", False, False),
    ],
)
def test_no_interleaving_of_a_step_in_slices_and_a_death_breaks_the_rule(
    topology: Topology, update: str, go_on: bool, twice: bool
) -> None:
    """Whoever owns a slice may die when nobody, one or all have its mean."""
    states, ends = explore(1, 1, topology, go_on=go_on, staggered=UPDATES[update], twice=twice)
    assert states > 18_000
    assert ends > 10


IN_SLICES = [
    *(
        (1, 2, topology, update, go_on, twice)
        for topology in (THREE_OF_TWO_SLICES, REPLICATED_IN_SLICES)
        for update in UPDATES
        for go_on in (False, True)
        for twice in (False, True)
    ),
    *((2, 1, THREE_OF_TWO_SLICES, update, go_on, False) for update in UPDATES for go_on in (False, True)),
    (2, 2, THREE_OF_TWO_SLICES, "flushed", False, False),
]


def some_in_slices() -> Iterator[object]:
    """One in sixteen for ``make test``: each takes seconds."""
    for number, history in enumerate(IN_SLICES):
        yield pytest.param(*history, marks=[] if number % 16 == 3 else [pytest.mark.slow])


@pytest.mark.parametrize(("deaths", "steps", "topology", "update", "go_on", "twice"), [*some_in_slices()])
def test_longer_histories_in_slices(
    deaths: int, steps: int, topology: Topology, update: str, go_on: bool, twice: bool
) -> None:
    states, _ = explore(deaths, steps, topology, go_on=go_on, staggered=UPDATES[update], twice=twice)
    assert states > 40_000


def test_no_interleaving_breaks_copies_of_sums() -> None:
    states, ends = explore(1, 2, copying=True)
    assert states > 70_000
    assert ends > 100


@pytest.mark.parametrize(
    ("topology", "update", "go_on", "evaluations"),
    [
        (THE_HEAD_TWICE, "staggered", True, Evaluations(1, at_end=True)),
        (A_REDUNDANT_HEAD, "flushed", False, Evaluations(1, at_start=True)),
    ],
)
def test_no_interleaving_of_a_step_an_evaluation_and_a_death_breaks_the_rule(
    topology: Topology, update: str, go_on: bool, evaluations: Evaluations
) -> None:
    states, ends = explore(1, 1, topology, go_on=go_on, staggered=UPDATES[update], evaluations=evaluations)
    assert states > 40_000
    assert ends > 100


EVALUATED = [
    *(
        (1, 1, topology, update, go_on, Evaluations(3, at_start=True, at_end=True))
        for topology in (REPLICATED_AND_NOT, WITH_A_REDUNDANT_LAYER, THE_HEAD_TWICE, A_REDUNDANT_HEAD)
        for update in UPDATES
        for go_on in (False, True)
    ),
    *((1, 2, THE_HEAD_TWICE, update, True, Evaluations(2, every=1)) for update in UPDATES),
    (1, 2, A_REDUNDANT_HEAD, "staggered", False, Evaluations(3, every=1)),
    (2, 1, THREE_REPLICAS, "flushed", False, Evaluations(2, at_start=True)),
    (2, 1, THREE_REPLICAS, "staggered", True, Evaluations(3, at_end=True)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("deaths", "steps", "topology", "update", "go_on", "evaluations"), EVALUATED)
def test_longer_histories_with_evaluations(
    deaths: int, steps: int, topology: Topology, update: str, go_on: bool, evaluations: Evaluations
) -> None:
    states, _ = explore(
        deaths, steps, topology, go_on=go_on, staggered=UPDATES[update], evaluations=evaluations
    )
    assert states > 60_000


LONGER = [
    *((1, 3, REPLICATED_AND_NOT, update, go_on, False) for update in UPDATES for go_on in (False, True)),
    *((1, 3, WITH_A_REDUNDANT_LAYER, update, go_on, False) for update in UPDATES for go_on in (False, True)),
    *((2, 2, THREE_REPLICAS, update, False, False) for update in UPDATES),
    (2, 2, THREE_REPLICAS, "flushed", True, False),
    (1, 3, REPLICATED_AND_NOT, "staggered", False, True),
    (2, 1, THREE_REPLICAS, "flushed", True, True),
    (2, 2, THREE_REPLICAS, "staggered", False, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("deaths", "rounds", "topology", "update", "go_on", "copying"), LONGER)
def test_longer_histories(
    deaths: int, rounds: int, topology: Topology, update: str, go_on: bool, copying: bool
) -> None:
    states, _ = explore(deaths, rounds, topology, go_on=go_on, staggered=UPDATES[update], copying=copying)
    assert states > 60_000


# ---------------------------------------------------------------------- planted bugs


@pytest.mark.parametrize("plant", plants.IN_THE_MACHINE, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: plants.Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        explore(2, 1, THREE_OF_TWO_SLICES)


@pytest.mark.parametrize("plant", plants.IN_SLICES, ids=lambda plant: plant.__name__)
def test_a_bug_planted_in_the_exchange_of_slices_is_found(
    plant: plants.Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        explore(1, 1, THREE_OF_TWO_SLICES)


@pytest.mark.parametrize("plant", plants.IN_AN_EVALUATION, ids=lambda plant: plant.__name__)
def test_a_bug_planted_in_an_evaluation_is_found(
    plant: plants.Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((Violation, LookupError)):
        explore(1, 1, THE_HEAD_TWICE, evaluations=Evaluations(2, at_start=True))


def test_a_copy_that_comes_after_the_answer_and_counts_breaks_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The decision was made without it, and another replica computes the micro-batch again."""
    fate = SumCopies.fate

    def late(self: SumCopies, source: str, layout: int, round_: int) -> Fate:
        dead, self.dead = self.dead, frozenset()
        found = fate(self, source, layout, round_)
        self.dead = dead
        return found

    hear = Device.hear

    def heard(self: Device, source: str, message: tuple) -> object:
        sent = hear(self, source, message)
        ledger = self.machine.now.board.ledger
        for what in self.machine.copies.inherit(self.machine.dead).values():
            for layer, micro_batches in what.done.items():
                for micro_batch in micro_batches:
                    ledger.inherit(layer, micro_batch)
        return sent

    monkeypatch.setattr(SumCopies, "fate", late)
    monkeypatch.setattr(Device, "hear", heard)
    with pytest.raises(Violation):
        explore(1, 1, THREE_REPLICAS, copying=True)


def test_an_early_update_that_a_report_leaves_in_place_breaks_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interrupted round would be mended with the weights of the next."""
    monkeypatch.setattr(Device, "_roll_back", lambda _self: None)
    with pytest.raises(Violation, match="weights"):
        explore(1, 2, staggered=Staggered(on=True))
