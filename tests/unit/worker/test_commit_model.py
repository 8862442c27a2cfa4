"""The commit rule, model-checked: every interleaving of three devices and their deaths."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from oobleckd.worker.round_machine.commit import Commit
from tests.helpers import commit_model
from tests.helpers.commit_states import REPLICATED_AND_NOT, THREE_REPLICAS, WITH_A_REDUNDANT_LAYER, Staggered


def test_no_interleaving_of_one_step_and_one_death_breaks_the_rule() -> None:
    states, ends = commit_model.explore(deaths=1, rounds=1)
    assert states > 10_000
    assert ends > 100


def test_no_interleaving_breaks_a_job_that_goes_on_re_routed() -> None:
    states, ends = commit_model.explore(deaths=1, rounds=1, go_on=True)
    assert states > 10_000
    assert ends > 100


@pytest.mark.parametrize("staggered", [Staggered(), Staggered(on=True)], ids=["flushed", "staggered"])
@pytest.mark.parametrize("go_on", [False, True])
def test_no_interleaving_breaks_a_holder_without_routes(go_on: bool, staggered: Staggered) -> None:
    states, ends = commit_model.explore(1, 1, WITH_A_REDUNDANT_LAYER, go_on=go_on, staggered=staggered)
    assert states > 5_000
    assert ends > 50


@pytest.mark.parametrize("through", [False, True])
def test_no_interleaving_breaks_a_staggered_update(through: bool) -> None:
    states, ends = commit_model.explore(deaths=1, rounds=1, staggered=Staggered(on=True, through=through))
    assert states > 20_000
    assert ends > 100


@pytest.mark.parametrize("go_on", [False, True])
def test_no_interleaving_breaks_copies_of_sums(go_on: bool) -> None:
    states, ends = commit_model.explore(deaths=1, rounds=1, go_on=go_on, copying=True)
    assert states > 20_000
    assert ends > 100


def test_a_copy_that_comes_after_the_answer_and_counts_breaks_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The decision was made without it, and another replica computes the micro-batch again."""
    keep = commit_model.World.keep

    def late(self: commit_model.World, source: str, target: str, round_: int, ledger: frozenset[int]) -> None:
        keep(self, source, target, round_, ledger)
        dev = self.devices[target]
        if source in dev.dead and round_ == dev.round:
            self.devices[target] = replace(dev, done=dev.done | ledger)

    monkeypatch.setattr(commit_model.World, "keep", late)
    with pytest.raises(commit_model.Violation):
        commit_model.explore(1, 1, THREE_REPLICAS, copying=True)


def test_an_early_update_that_a_report_leaves_in_place_breaks_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interrupted round would be mended with the weights of the next."""
    report = commit_model.World.report

    def keep(self: commit_model.World, name: str, epoch: int, dead: frozenset[str]) -> None:
        before = self.devices[name]
        report(self, name, epoch, dead)
        self.devices[name] = replace(self.devices[name], weights=before.weights, saved=before.saved)

    monkeypatch.setattr(commit_model.World, "report", keep)
    with pytest.raises(commit_model.Violation, match="with weights"):
        commit_model.explore(deaths=1, rounds=1, staggered=Staggered(on=True))


@pytest.mark.slow
@pytest.mark.parametrize("staggered", [Staggered(), Staggered(on=True)], ids=["flushed", "staggered"])
@pytest.mark.parametrize("go_on", [False, True])
@pytest.mark.parametrize("copying", [False, True], ids=["uncopied", "copied"])
@pytest.mark.parametrize(
    ("deaths", "rounds", "topology"),
    [(1, 2, REPLICATED_AND_NOT), (2, 1, THREE_REPLICAS)],
    ids=["two steps", "two deaths"],
)
def test_longer_histories(
    deaths: int,
    rounds: int,
    topology: commit_model.Topology,
    go_on: bool,
    staggered: Staggered,
    copying: bool,
) -> None:
    states, _ = commit_model.explore(
        deaths, rounds, topology, go_on=go_on, staggered=staggered, copying=copying
    )
    assert states > 100_000


def test_without_the_fence_after_an_answer_the_rule_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that goes on to contribute, vote or commit after it has answered a report."""
    monkeypatch.setattr(Commit, "frozen", property(lambda _: False))
    with pytest.raises(commit_model.Violation):
        commit_model.explore(deaths=1, rounds=1)


def test_taking_decisions_of_lower_epochs_breaks_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(self: Commit, epoch: int, live: Iterable[str]) -> bool:
        if epoch <= self.epoch:
            return False
        self.epoch, self.answered = epoch, max(epoch, self.answered)
        self.live, self.votes = frozenset(live), {}
        return True

    monkeypatch.setattr(Commit, "decide", decide)
    with pytest.raises(commit_model.Violation):
        commit_model.explore(2, 1, THREE_REPLICAS)
