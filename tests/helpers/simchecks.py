"""What must be so in a simulated world, whatever fails: asserted while it runs, and at the end of a job.

Owns what devices have told of their rounds. The machine's own state is checked by ``core.invariants``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oobleckd.protocol.parts import Counters, Outcome
from tests.helpers.simdevice import SimDevice
from tests.helpers.simpasses import loss_of
from tests.helpers.simstore import trail_of

if TYPE_CHECKING:
    from tests.helpers.world import World


class Checks:
    """``outcomes``: what was committed in each round of the present history, which began at epoch ``history``."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.outcomes: dict[tuple[str, int], tuple[Counters, str, tuple[int, int]]] = {}
        self.history = 0
        self.last_copy_lost = False

    def begin_history(self, epoch: int) -> None:
        """State comes from outside the devices: a history begins, whose rounds only it must agree on."""
        self.outcomes = self.outcomes if epoch == self.history else {}
        self.history = epoch

    def committed(
        self, device: SimDevice, counters: Counters, outcome: Outcome, weights: tuple[int, int]
    ) -> None:
        """Every device commits a round with the same outcome, counters and weights after it."""
        here = (counters, outcome, weights)
        seen = self.outcomes.setdefault((device.job, counters.round), here)
        assert seen == here, f"{device.name}: {here}, others {seen}"

    def note_lost_copies(self) -> None:
        """Only where this finds a layer without a copy may the job go back."""
        held = {layer for device in self.world.devices() for layer in device.held_layers}
        self.last_copy_lost |= held != set(range(self.world.num_layers))

    def done(self, job_id: str) -> None:
        """The job is done, every step is recorded once, with the loss of a run without failures."""
        world = self.world
        job = world.job(job_id)
        assert job.state == "done", (job.state, job.reason)
        assert [step.step for step in job.steps] == list(range(job.spec.train.steps))
        assert self.last_copy_lost or job.steps_lost == 0
        assert not any(incident.open for incident in world.incidents())
        for step in job.steps:
            losses = [loss_of(step.step, mb) for mb in range(world.num_micro_batches)]
            assert step.loss == sum(losses) / len(losses)
        wanted = (job.spec.train.steps - len(world.nans), trail_of(job.spec.train.steps, world))
        assert {state[::2] for state in world.complete[job.checkpoint].values()} == {wanted}

    def describe(self) -> str:
        """Where everything stands, for a failing test."""
        world = self.world
        if world.machine is None or world.machine.core.run is None:
            return f"seed {world.seed}: no run"
        run = world.machine.core.run
        lines = [
            f"seed {world.seed}: {run.job.state} ({run.job.reason}) phase {run.phase} epoch {run.job.epoch}",
            f"dead {run.job.dead} held {sorted(run.held)} answers {sorted(run.answers)} asked {run.asked}",
        ]
        for node in world.nodes.values():
            for device in node.devices.values():
                lines.append(
                    f"{device.name} alive={device.alive} conn={node.connected} job={device.job!r} "
                    f"layout={device.layout.epoch} epoch={device.commit.epoch}/{device.commit.answered} "
                    f"{device.counters} holding={device.holding} deployment={device.deployment is not None} "
                    f"{device.at()}"
                )
        lines += [change.text for change in world.daemon.changes[-12:]]
        return "\n".join(lines)
