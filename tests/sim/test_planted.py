"""Bugs planted in the code that runs in production: the weather finds each of them within 200 seeds.

Those of the round machine are in ``plants``: the model check finds them, too
(``tests/unit/worker/test_commit_model.py``). What the daemon says to a device keeps its order on every real
link, so a decision never comes after a report of a higher epoch: to put that fence to the test, decisions
come again here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from oobleckd.core import agents, deploy, machine, recovery, steps
from oobleckd.core.context import Core
from oobleckd.core.decide import Verdict
from oobleckd.core.entries import Restarted
from oobleckd.core.events import Command, MakePlan, Tell
from oobleckd.core.membership import Membership
from oobleckd.core.state import JobRecord
from oobleckd.daemon.waiting import Told, Waiting
from oobleckd.planner.plan import node_of
from oobleckd.protocol.messages import Decide, Emptied, Progress, Release, Report, StepDone
from oobleckd.worker.agent.outbox import Outbox
from oobleckd.worker.device.device import DeviceProcess
from oobleckd.worker.round_machine.ledger import Ledger
from oobleckd.worker.round_machine.tasks import Board
from oobleckd.worker.training.executor import Executor
from tests.helpers import plants, weather
from tests.helpers.simdevice import SimDevice
from tests.helpers.simstore import Said, SimReducer

SEEDS = 200
Plant = Callable[[pytest.MonkeyPatch], None]


# ---------------------------------------------------------------------- in the worker


def old_decisions_come_and_are_obeyed(patch: pytest.MonkeyPatch) -> None:
    """As ``plants`` has it, where what the daemon says does not keep its order."""
    decisions_come_again(patch)
    plants.old_decisions_are_obeyed(patch)


def decisions_come_again(patch: pytest.MonkeyPatch) -> None:
    """No bug: behind every report the decision before it arrives once more, which no real link does."""
    control, last = SimDevice.control, dict[SimDevice, Decide]()

    def controlled(self: SimDevice, message: Any) -> None:
        control(self, message)
        if isinstance(message, Decide):
            last[self] = message
        elif isinstance(message, Report) and self in last:
            control(self, last[self])

    patch.setattr(SimDevice, "control", controlled)


def contributed_one_too_early(patch: pytest.MonkeyPatch) -> None:
    """The worker's ledger is off by one: a bucket counts as complete with a micro-batch missing."""
    patch.setattr(Ledger, "complete", lambda self, layer: len(self.owed[layer] - self.done[layer]) <= 1)


def told_one_too_few(patch: pytest.MonkeyPatch) -> None:
    """What a device answers to a report lacks a micro-batch of a layer."""

    def says(self: Executor, tell: Callable[[Any], None]) -> Callable[[Any], None]:
        def told(message: Any) -> None:
            if isinstance(message, Progress):
                done = {layer: micro_batches[:-1] for layer, micro_batches in message.done.items()}
                message = msgspec.structs.replace(message, done=done)
            tell(message)

        return told

    report = Executor.report

    def reported(self: Executor, *args: Any) -> None:
        tell, self.tell = self.tell, says(self, self.tell)
        report(self, *args)
        self.tell = tell

    patch.setattr(Executor, "report", reported)


def nothing_is_frozen(patch: pytest.MonkeyPatch) -> None:
    """Micro-batches over the dead are answered for, and what was begun of them goes on."""
    patch.setattr(Board, "freeze", lambda _self, _micro_batches: None)


def not_taken_back(patch: pytest.MonkeyPatch) -> None:
    """An update that was made early stays where its round does not go through."""

    def kept(self: Executor) -> None:
        early, self.early = self.early, None
        self.returned |= early.passes.taken if early else {}

    patch.setattr(Executor, "_roll_back", kept)


def release_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """Who was given up keeps what it holds, and says otherwise."""
    handle = DeviceProcess._handle

    def handled(self: DeviceProcess, control: Any) -> None:
        if isinstance(control, Release):
            self.tell(Emptied(control.device, control.order))
        else:
            handle(self, control)

    patch.setattr(DeviceProcess, "_handle", handled)


def steps_are_said_once(patch: pytest.MonkeyPatch) -> None:
    """An agent does not keep rounds until they are acknowledged."""
    said = Outbox.said
    patch.setattr(Outbox, "said", lambda self, head, data: head.type != "StepDone" and said(self, head, data))


def losses_are_left_out(patch: pytest.MonkeyPatch) -> None:
    """The losses of the head do not travel with its sums."""
    said = SimReducer._said

    def without(self: SimReducer, bucket: int, beside: Mapping[str, Any]) -> Said:
        return said(self, bucket, beside)._replace(losses={})

    patch.setattr(SimReducer, "_said", without)


# ---------------------------------------------------------------------- in the core


def old_answers_count(patch: pytest.MonkeyPatch) -> None:
    """The core's epoch fence: answers of any epoch are taken for those of the present one."""
    for module, name in ((recovery, "on_progress"), (deploy, "on_ready"), (steps, "on_held")):
        real = getattr(module, name)

        def heard(core: Core, message: Any, real: Callable[..., None] = real) -> None:
            epoch = core.run.job.epoch if core.run is not None else message.epoch
            real(core, msgspec.structs.replace(message, epoch=epoch))

        patch.setattr(module, name, heard)


def steps_count_twice(patch: pytest.MonkeyPatch) -> None:
    """A round that a second device tells of is recorded again."""
    real = steps.on_step_done

    def done(core: Core, message: StepDone) -> None:
        real(core, message)
        job: JobRecord | None = core.state.jobs.get(message.job)
        if job is not None and not job.final and message.counters.round == job.counters.round - 2:
            steps._record(core, job, message)

    patch.setattr(steps, "on_step_done", done)


def a_commit_of_some(patch: pytest.MonkeyPatch) -> None:
    """A round commits as soon as one survivor has reduced all that it holds."""
    real = recovery.decide

    def decided(epoch: int, progress: dict[str, Progress], *rest: Any) -> Verdict:
        votes = [answer.vote for answer in progress.values() if answer.vote is not None]
        if votes:
            progress = {
                device: msgspec.structs.replace(answer, vote=answer.vote or votes[0])
                for device, answer in progress.items()
            }
        return real(epoch, progress, *rest)

    patch.setattr(recovery, "decide", decided)


def nobody_is_asked_again(patch: pytest.MonkeyPatch) -> None:
    """An agent that is back on a new connection is not told what it may have missed."""
    patch.setattr(recovery, "remind", lambda *_args, **_named: None)


def links_never_break(patch: pytest.MonkeyPatch) -> None:
    """What devices say of broken links is not heard."""
    patch.setattr(agents, "link_down", lambda _core, _message: None)


def any_incarnation_will_do(patch: pytest.MonkeyPatch) -> None:
    """A device that began a new incarnation is taken for the one that held the layers."""

    def living(self: Membership, device: str, _incarnation: str) -> bool:
        node = self.nodes.get(node_of(device))
        return node is not None and node.alive and device not in node.fallen

    patch.setattr(Membership, "living", living)


def leases_run_while_we_sleep(patch: pytest.MonkeyPatch) -> None:
    """A daemon that stood still takes its own silence for that of others."""
    patch.setattr(Membership, "attend", lambda _self, _now, _due: 0.0)


def no_gap_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A daemon that starts uses the epoch that the one before it may have told of."""
    patch.setattr(machine, "Restarted", lambda _, at: Restarted(0, at))
    patch.setattr(Core, "next_epoch", lambda core: core.state.epoch + 1)


def nothing_waits_for_the_disk(patch: pytest.MonkeyPatch) -> None:
    """All that is said leaves before what it rests on is durable."""

    def put(self: Waiting, commands: list[Command]) -> list[Command]:
        now = [command for command in commands if isinstance(command, Tell | MakePlan)]
        self._queue += [Told() if isinstance(c, Tell) else c for c in commands if not isinstance(c, MakePlan)]
        return now

    patch.setattr(Waiting, "put", put)


BUGS: dict[Plant, int] = {
    plants.a_vote_counts_twice: 1,
    plants.old_messages_count: 13,
    plants.an_update_before_all_votes: 0,
    plants.answered_and_still_updating: 2,
    old_decisions_come_and_are_obeyed: 10,
    contributed_one_too_early: 0,
    told_one_too_few: 30,
    nothing_is_frozen: 2,
    not_taken_back: 13,
    release_is_dropped: 6,
    steps_are_said_once: 7,
    losses_are_left_out: 0,
    old_answers_count: 132,
    steps_count_twice: 7,
    a_commit_of_some: 6,
    nobody_is_asked_again: 8,
    links_never_break: 6,
    any_incarnation_will_do: 15,
    leases_run_while_we_sleep: 15,
    no_gap_after_a_restart: 41,
    nothing_waits_for_the_disk: 0,
}
"""Each with the seed that found it last, which is tried first: any other within 200 will do."""


def test_decisions_that_come_again_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions_come_again(monkeypatch)
    for seed in range(6):
        weather.run(weather.forecast(seed))


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_it_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in sorted(range(SEEDS), key=lambda seed: seed != BUGS[plant]):
        try:
            weather.run(weather.forecast(seed))
        except weather.VIOLATIONS as error:
            print(f"{plant.__name__}: seed {seed}: {type(error).__name__}: {error}".partition("\n")[0])
            return
    pytest.fail(f"{plant.__name__} is not found in {SEEDS} seeds: the weather is too mild")
