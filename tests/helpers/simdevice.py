"""A device process of a simulated world: the worker's own code, on a virtual clock.

Real are the process's handling of controls, deployments, the executor with its votes, staggered update and
take-backs, tasks, ledger and sums. Not real are processes, sockets, tensors and time: ``simstore`` and
``simpasses`` stand in for arithmetic, and a task takes virtual seconds in which the device hears nothing, as
a real one does. At the worker's own fault points a device dies where that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from oobleckd.planner.plan import Layout
from oobleckd.protocol.checkpointmessages import CheckpointFailed, CheckpointPart
from oobleckd.protocol.datamessages import Identified
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import Measured, OpTimes, Ready, StepDone, ToWorker
from oobleckd.protocol.parts import Counters, DeviceInfo, bits_of
from oobleckd.protocol.traits import KIND
from oobleckd.worker.canary.canary import Canary
from oobleckd.worker.checkpointing.snapshot import Share
from oobleckd.worker.device.context import DeviceContext
from oobleckd.worker.device.device import DeviceProcess
from oobleckd.worker.messaging.gather import Intake
from oobleckd.worker.messaging.messenger import TransportMessenger
from oobleckd.worker.round.passes import Passes
from oobleckd.worker.round_machine.commands import CommitRound, RoundSpec
from oobleckd.worker.round_machine.commit import Commit, ReplicasDisagree
from oobleckd.worker.round_machine.tasks import Order, Step
from oobleckd.worker.runtime.activity import ActivityPage
from oobleckd.worker.runtime.faults import Faults
from oobleckd.worker.runtime.timing import DeviceTimer
from oobleckd.worker.sums.guard import SumsChanged
from oobleckd.worker.training.executor import Executor
from oobleckd.worker.transport.mailbox import Mailbox, TensorMessage
from tests.helpers.simpasses import SimPasses
from tests.helpers.simshards import SimShardGroup
from tests.helpers.simstore import CPU, SimReducer, SimStore, updated
from tests.helpers.simtext import SimReading
from tests.helpers.simtransport import Link, SimGroupManager, SimTransport

if TYPE_CHECKING:
    from tests.helpers.simagent import SimNode
    from tests.helpers.world import World

_NOWHERE = Layout(0, 0, {}, ())
_TIMED: AbstractContextManager[None] = nullcontext()


class Died(Exception):
    """Raised at a fault point, in place of the real SIGKILL."""


class SimFaults(Faults):
    """Fault points that end the device's present piece of work instead of the process, where it or the world
    says so.
    """

    def __init__(self, sim: SimDevice) -> None:
        super().__init__(sim.name, Path())
        self.sim = sim

    def reach(self, point: str, round_: int) -> None:
        super().reach(point, round_)
        if self.sim.world.strikes(self.sim, point, round_):
            raise Died(point)

    def strike(self, point: str, round_: int, *, hang: bool) -> None:
        raise Died(point)


class SimActivity(ActivityPage):
    """Nobody watches."""

    def __init__(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def doing(self, kind: str, what: str = "", units: int = 1) -> AbstractContextManager[None]:
        return _TIMED


class SimDevice(DeviceProcess):
    """One incarnation of one device."""

    kind = "cpu"

    def __init__(self, world: World, node: SimNode, name: str) -> None:
        self.world, self.node, self.name = world, node, name
        self.incarnation = f"incarnation-{next(world.numbers)}"
        self.alive, self.busy, self.busy_s = True, False, 0.0
        self.followed = 0  # tasks of the planner's order
        self.ahead = 0  # layers of forward passes that were run for another device
        self.context = DeviceContext(name, self.kind, "host", "", Path())
        self.activity, self.faults, self.mailbox = SimActivity(), SimFaults(self), Mailbox()
        self.torch_device = CPU
        self.canary = Canary(name, CPU, {})
        self.transport: Any = SimTransport(self)
        self.groups: Any = SimGroupManager()
        self.messenger = TransportMessenger(
            self.transport, self.groups, Intake(self.mailbox), self.mailbox, CPU
        )
        self.executor: SimExecutor | None = None
        self.flips: list[Any] = []
        self.deployment = None
        self.precopy_target = None
        self.job_id = ""
        self.reading: Any = SimReading(self)
        # What the agent knows of it, for its Hello: told after every control message, as the real device
        # does.
        self._tell_up()

    # ------------------------------------------------------------------ what others look at

    @property
    def job(self) -> str:
        return self.job_id

    @property
    def layout(self) -> Layout:
        return self.executor.layout if self.executor else _NOWHERE

    @property
    def dead(self) -> frozenset[str]:
        return self.executor.machine.dead if self.executor else frozenset()

    @property
    def commit(self) -> Commit:
        return self.executor.machine.commit if self.executor else Commit(self.name)

    @property
    def counters(self) -> Counters:
        return self.executor.counters if self.executor else Counters()

    @property
    def holding(self) -> bool:
        return self.executor is None or self.executor.holding

    @property
    def order(self) -> Order:
        """The planner's, for every round."""
        return self.executor.machine.order if self.executor else ()

    @property
    def planned(self) -> Collection[Step]:
        """What is left of it in this round."""
        return self.executor.now.board.order if self.executor else ()

    @property
    def held_layers(self) -> Collection[int]:
        return self.executor.store.layers if self.executor else ()

    def at(self) -> str:
        """What it is in the middle of, for a failing test."""
        if self.executor is None:
            return "no job"
        now, reducer = self.executor.now, self.executor.reducer
        left = [*now.board.forward, *now.board.in_flight, *now.board.weights]
        return f"reduced={sorted(reducer.reduced)} left={left} phase={self.executor.machine.phase}"

    # ------------------------------------------------------------------ the loop

    def control(self, message: ToWorker) -> None:
        """The agent hands on a message."""
        self.world.checks.heard(self, message)
        self.mailbox.put_control(message)
        if self.busy:
            self._alive(self._answer)
        self.poke()

    def tensor_message(self, link: Link, message: TensorMessage) -> None:
        """Something arrived from a peer."""
        self.transport.arrive(link, message)
        self.poke()

    def asked_again(self) -> None:
        """A peer has another secret by now with which its link may open."""
        self.transport.open_early()
        self.poke()

    def poke(self) -> None:
        """As ``run``, until there is nothing to do or a task has begun."""
        self._alive(self._turns)

    def _turns(self) -> None:
        while self.alive and not self.busy:
            controls = self.mailbox.controls()
            for control in controls:
                self._guarded(control)
            if controls:
                self._tell_up()
            if not self._work():
                return

    def work(self, layers: float, act: Callable[..., None], *args: Any) -> None:
        """Be busy for so many layers' time, then ``act``."""
        self.busy = True
        seconds = self.world.layer_s * layers * self.world.random.uniform(0.8, 1.2) * self.node.slow
        self.busy_s += seconds
        self.after(seconds, self._worked, act, args)

    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """In so many seconds, if this incarnation goes on; later where the process is stopped by then."""
        self.world.after(seconds, self.node.host.call, self._living, act, args)

    def _living(self, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.alive:
            act(*args)

    def _worked(self, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.busy = False

        self._alive(act, *args)
        self.poke()

    def _alive(self, act: Callable[..., None], *args: Any) -> None:
        if not self.alive:
            return
        try:
            act(*args)
        except Died as died:
            self.world.struck(self, str(died))
        except (
            ReplicasDisagree,
            SumsChanged,
        ) as error:  # in the middle of a task, which is inside of `_work` on a real device
            self._distrust(error)

    # ------------------------------------------------------------------ in place of processes and torch

    def tell(self, message: Any) -> None:
        """To the agent. Real seconds have no place here, and an empty bucket has no bytes: a copied layer
        counts one.
        """
        if isinstance(message, StepDone):
            self.world.early += message.early
            self.world.taken_back += message.taken_back
            message = msgspec.structs.replace(message, step_s=0.1, busy_s=self.busy_s)
            self.busy_s = 0.0
        elif isinstance(message, OpTimes):
            message = msgspec.structs.replace(message, at=0.0)  # the clock of its ops is the world's
        elif isinstance(message, Ready) and self.deployment and self.deployment.message.source == "copy":
            layers = self.deployment.layers.layers() if self.deployment.layers else ()
            new = [layer for layer in layers if layer not in self.held_layers]
            staged = sum(layer in self.deployment.staged for layer in new)  # bucket n is of layer n alone
            message = msgspec.structs.replace(message, copied_bytes=len(new) - staged, staged_bytes=staged)
        if self.alive:
            self.world.checks.says(self, message)
            self.node.from_device(message)

    def _tell_up(self) -> None:
        said = (self.world.rounds_apart | self.world.says_apart).get(self.name, "")
        self.known = DeviceInfo(
            self.name, self.kind, self.kind, 0, self.transport.address, "", 1, self.job_id, self.layout.epoch,
            self.commit.answered, self.counters.step, self.counters.round,
            self.holding or (self.executor is not None and self.executor.misread), self.incarnation,
            said, self.canary.traits({KIND: bits_of("cpu", said)}) if self.canary.said else {},
        )  # fmt: skip

    def _measure(self, message: Any) -> None:
        self.reading.corpus(message.job, message.spec)
        self.after(0.02, self.tell, Measured(self.name, message.job, self.world.profile, self.reading.inputs))

    def _compile(self, *_: object) -> None:
        """Layers are numbers here."""

    def _deploy(self, message: Any) -> None:
        if message.source != "copy":
            self.world.checks.begin_history(message.epoch)
        super()._deploy(message)

    def _begin_job(self, job_id: str, job: Job) -> Executor:
        self.job_id = job_id
        corpus = self.reading.corpus(job_id, job)
        self.canary.said = self.world.canaries.get(self.name, "")
        self._tell_up()
        self.tell(Identified(self.name, job_id, self.reading.inputs, canary=self.canary.said))
        self.executor = SimExecutor(self, job_id, job, corpus)
        return self.executor

    def _release(self, *, abandon: bool = True) -> None:
        if self.executor is not None and abandon:
            self.executor.saving.writer.abandon()
        self.executor, self.deployment, self.precopy_target, self.job_id = None, None, None, ""
        self.reading.rest()
        self.messenger.purge(lambda _: True)
        self._forget(self.transport.peers())


class SimWriter:
    """In place of ``oobleckd.worker.checkpointing.writer.BackgroundWriter``: writes beside training, each
    bucket in a while of virtual time, ``slow`` times as long.
    """

    slow = 1.0

    def __init__(self, sim: SimDevice) -> None:
        self.sim, self.shares, self.abandoned = sim, list[Share](), False
        self.refused = ("", -1)

    @property
    def busy(self) -> bool:
        return bool(self.shares)

    @property
    def blocks(self) -> bool:
        return not all(share.copied for share in self.shares)

    def begin(self, share: Share) -> None:
        self.shares.append(share)
        if len(self.shares) == 1:
            self._later(sorted(share.states))

    def abandon(self) -> None:
        self.abandoned = True

    def _later(self, left: Sequence[int]) -> None:
        seconds = self.slow * self.sim.world.layer_s * self.sim.world.random.uniform(0.1, 1.5)
        self.sim.world.after(seconds, self.sim._alive, self._go_on, left)

    def _go_on(self, left: Sequence[int]) -> None:
        if self.abandoned:
            return
        share = self.shares[0]
        if left and self.sim.world.disk_full:
            self._refused(share, left)
            return
        if left:
            self._write(share, left[0])
            self._later(left[1:])
            return
        self._next()

    def _refused(self, share: Share, left: Sequence[int]) -> None:
        """As ``BackgroundWriter``: said once; the last one is tried again, any other given up."""
        directory = str(share.directory)
        if (directory, share.counters.round) != self.refused:
            self.refused = directory, share.counters.round
            self.sim.tell(
                CheckpointFailed(
                    share.device, share.job_id, share.counters, directory,
                    f"{directory} cannot be written: full", 1, 0, share.last, "ENOSPC",
                )
            )  # fmt: skip
        if share.last:
            self.sim.world.after(1.0, self.sim._alive, self._go_on, left)
        else:
            self._next()

    def _next(self) -> None:
        self.shares.pop(0)
        if self.shares:
            self._later(sorted(self.shares[0].states))
        self.sim.poke()

    def _write(self, share: Share, index: int) -> None:
        world, faults = self.sim.world, self.sim.faults
        faults.reach("checkpoint-write", share.counters.round)
        world.write(str(share.directory), index, share.states[index].exponents)
        faults.reach("checkpoint", share.counters.round)
        self.sim.tell(
            CheckpointPart(
                share.device, share.job_id, share.counters, str(share.directory), index, share.num_buckets,
                f"bucket-{index}", 1, "00", {},
            )
        )  # fmt: skip


class SimExecutor(Executor):
    """The worker's executor; an update changes numbers, and the world sees every commit."""

    store: SimStore

    def __init__(self, sim: SimDevice, job_id: str, job: Job, corpus: Any) -> None:
        self.sim = sim
        store: Any = SimStore(sim.world)
        super().__init__(
            sim.name, job_id, job, store, corpus, sim.messenger, sim.faults, sim.tell, sim.activity,
            writer=SimWriter(sim), check_inputs=sim.reading.check,
        )  # fmt: skip
        self.group: SimShardGroup = SimShardGroup.of(sim, self.group)
        self.context = replace(self.context, group=self.group, timer=DeviceTimer(lambda: sim.world.now))
        self.now = self._passes(self.machine.now)

    def _reducer(self, released: Any) -> SimReducer:
        return SimReducer(
            self.sim.world, self.machine, self.store, self.messenger, self.weights_of,
            exact=self.job.train.exact,
        )  # fmt: skip

    def adopt(self, layout: Layout, counters: Counters, order: Order = ()) -> None:
        super().adopt(layout, counters, order)
        assert self.store.weights()[0] == counters.applied, "stale state"

    def _passes(self, spec: RoundSpec, returned: Any = None) -> Passes:
        return SimPasses(self.sim, self.context, spec, self.copies, returned)

    def _apply(self, counters: Counters, scale: float) -> None:
        assert len(self.reducer.reduced) == len(self.store.buckets), "an update of what is not reduced"
        for bucket, means in self.reducer.means.items():
            assert not self.store.shard(bucket).slices & ~means.here, "an update without its means"
        scale += self.sim.world.texts.spoilt(self.job_id, counters.round)
        for state in self.store.buckets.values():
            assert state.exponents[0] == counters.applied, f"updated twice: {state.exponents}"
            state.exponents = updated(state.exponents, counters.step, scale)
            self.faults.reach("update", counters.round)

    def _tell_evaluated(self, command: CommitRound) -> None:
        rounds, losses = self.job.eval_rounds, command.vote.losses
        assert sorted(losses) == list(range(rounds.num_evaluated(command.was))), "losses are incomplete"
        assert not command.vote.norms, "an evaluation has no gradients"
        super()._tell_evaluated(command)
        self.sim.world.checks.committed(self.sim, command.was, command.outcome, self.store.weights())

    def _update(self, command: CommitRound) -> None:
        world, vote = self.sim.world, command.vote
        assert sorted(vote.losses) == list(range(world.sizes.micro_batches(command.was.step))), (
            "losses are incomplete"
        )
        assert sorted(vote.norms) == list(range(len(world.buckets))), "norms are incomplete"
        super()._update(command)
        world.checks.committed(self.sim, command.was, command.outcome, self.store.weights())
