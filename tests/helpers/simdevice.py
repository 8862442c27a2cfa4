"""A device process of a simulated world: the worker's own code, on a virtual clock.

Real are the process's handling of controls, deployments, the executor with its votes, staggered update and
take-backs, tasks, ledger and sums. Not real are processes, sockets, tensors and time: ``simstore`` and ``simpasses``
stand in for arithmetic, and a task takes virtual seconds in which the device hears nothing, as a real one does. At
the worker's own fault points a device dies where that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import CheckpointPart, Measured, Ready, StepDone, ToWorker
from oobleckd.protocol.parts import Counters, DeviceInfo, Outcome, Peer, Vote
from planner.plan import Layout
from tests.helpers.simpasses import SimPasses
from tests.helpers.simstore import CPU, SimReducer, SimStore, updated
from worker.commit import Commit
from worker.device import DeviceProcess, Place
from worker.executor import Executor
from worker.faults import Faults
from worker.mailbox import Key, Letter, Mailbox
from worker.passes import Given, Passes
from worker.post import TransportPost
from worker.pulse import Pulse
from worker.snapshot import checkpoint_dir, writer_of
from worker.tasks import Order, Step

if TYPE_CHECKING:
    from tests.helpers.world import SimNode, World

_NOWHERE = Layout(0, 0, {}, ())
_TIMED: AbstractContextManager[None] = nullcontext()


class Died(Exception):
    """Raised at a fault point, in place of the real SIGKILL."""


class SimFaults(Faults):
    """Fault points that end the device's present piece of work instead of the process, where it or the world says so."""

    def __init__(self, sim: SimDevice) -> None:
        super().__init__(sim.name, Path())
        self.sim = sim

    def reach(self, point: str, round_: int) -> None:
        super().reach(point, round_)
        if self.sim.world.strikes(self.sim, point, round_):
            raise Died(point)

    def strike(self, point: str, round_: int, *, hang: bool) -> None:
        raise Died(point)


class SimPulse(Pulse):
    """Nobody watches."""

    def __init__(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def doing(self, kind: str, what: str = "", units: int = 1) -> AbstractContextManager[None]:
        return _TIMED


@dataclass(eq=False)
class Link:
    """One way from a device to a life of a peer. It opens once that one has its secret and has not forgotten the sender."""

    secret: bytes
    is_open: bool = False
    closed: bool = False


class SimTransport:
    """Links to peers by address, which tells their lives apart; as ``worker.transport`` has it."""

    def __init__(self, sim: SimDevice) -> None:
        self.sim, self.device, self.address = sim, sim.name, f"{sim.name}:{sim.life}"
        self.known: dict[str, str] = {}
        self.links: dict[str, Link] = {}
        self.left: set[str] = set()
        self.forgotten: set[str] = set()
        self.secrets: list[bytes] = []
        self.incoming: dict[str, list[tuple[SimTransport, Link]]] = {}
        self.early: list[tuple[SimTransport, Link, Letter]] = []

    def peers(self) -> frozenset[str]:
        return frozenset(self.known)

    def configure(self, peers: Mapping[str, Peer], secret: bytes) -> None:
        self.secrets.append(secret)
        for name, peer in peers.items():
            if self.known.get(name) != peer.address:
                self.links.pop(name, None)
            self.known[name] = peer.address
            self.left.discard(name)
            self.forgotten.discard(peer.address)
        early, self.early = self.early, []
        for waiting in early:
            self.arrive(*waiting)

    def forget(self, peers: Collection[str]) -> None:
        for peer in peers:
            self.links.pop(peer, None)
            if (address := self.known.pop(peer, None)) is not None:
                self.forgotten.add(address)
                for source, link in self.incoming.pop(address, []):
                    link.closed = True
                    source.said_goodbye(self.device, link)

    def said_goodbye(self, peer: str, link: Link) -> None:
        if self.links.get(peer) is link:
            del self.links[peer]
            self.left.add(peer)

    def send(self, peer: str, key: Key, tensors: Sequence[Any], meta: bytes = b"") -> bool:
        target = self.sim.world.device(peer)
        if target is None or self.known.get(peer) != target.transport.address or peer in self.left:
            return False
        link = self.links.setdefault(peer, Link(self.secrets[-1]))
        letter = Letter(key, self.device, meta, list(tensors))
        self.sim.world.send(self.sim, target, self, link, letter)
        return True

    def arrive(self, source: SimTransport, link: Link, letter: Letter) -> None:
        if link.closed:
            return
        if link.is_open:
            self.sim.mailbox.put(letter)
        elif link.secret in self.secrets and source.address not in self.forgotten:
            link.is_open = True
            self.incoming.setdefault(source.address, []).append((source, link))
            self.sim.mailbox.put(letter)
        else:
            self.early.append((source, link, letter))


class SimPlane:
    """No groups: all letters take the transport."""

    def offer(self, *_letter: object) -> bool:
        return False

    def enter(self, epoch: int, devices: object) -> None:
        pass

    def forget(self, peers: object) -> None:
        pass

    def leave(self) -> None:
        pass


class SimCorpus:
    """A sample for every micro-batch."""

    digest = ""

    def sample_ids(self, step: int, micro_batch: int) -> tuple[int, ...]:
        return (step * 1000 + micro_batch,)


class SimDevice(DeviceProcess):
    """One life of one device."""

    def __init__(self, world: World, node: SimNode, name: str) -> None:
        self.world, self.node, self.name = world, node, name
        self.life = f"life-{next(world.lives)}"
        self.alive, self.busy = True, False
        self.followed = 0  # tasks of the planner's order
        self.ahead = 0  # layers of forward passes that were run for another device
        self.place = Place(name, "cpu", "host", "", Path())
        self.pulse, self.faults, self.mailbox = SimPulse(), SimFaults(self), Mailbox()
        self.torch_device = CPU
        self.transport: Any = SimTransport(self)
        self.plane: Any = SimPlane()
        self.post = TransportPost(self.transport, self.plane, self.mailbox, CPU)
        self.executor: SimExecutor | None = None
        self.deployment = None
        self.job_id = ""
        # What the agent knows of it, for its Hello: told after every control message, as the real device does.
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
        return self.executor.dead if self.executor else frozenset()

    @property
    def commit(self) -> Commit:
        return self.executor.commit if self.executor else Commit(self.name)

    @property
    def counters(self) -> Counters:
        return self.executor.counters if self.executor else Counters()

    @property
    def holding(self) -> bool:
        return self.executor is None or self.executor.holding

    @property
    def order(self) -> Order:
        """The planner's, for every round."""
        return self.executor.order if self.executor else ()

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
        return f"reduced={sorted(reducer.reduced)} left={left} hurried={self.executor.hurried is not None}"

    # ------------------------------------------------------------------ the loop

    def control(self, message: ToWorker) -> None:
        """The agent hands on a message."""
        self.mailbox.post(message)
        if self.busy:
            self._alive(self._answer)
        self.poke()

    def letter(self, source: SimTransport, link: Link, letter: Letter) -> None:
        """Something arrived from a peer."""
        self.transport.arrive(source, link, letter)
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
        seconds = self.world.layer_s * layers * self.world.random.uniform(0.8, 1.2)
        self.world.after(seconds, self._worked, act, args)

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

    # ------------------------------------------------------------------ in place of processes and torch

    def tell(self, message: Any) -> None:
        """To the agent. Real seconds have no place here, and an empty bucket has no bytes: a copied layer counts one."""
        if isinstance(message, StepDone):
            self.world.early += message.early
            self.world.taken_back += message.taken_back
            message = msgspec.structs.replace(message, step_s=0.1, busy_s=0.1)
        elif isinstance(message, Ready) and self.deployment and self.deployment.message.source == "copy":
            layers = self.deployment.layers.layers() if self.deployment.layers else ()
            copied = sum(layer not in self.held_layers for layer in layers)
            message = msgspec.structs.replace(message, copied_bytes=copied)
        if self.alive:
            self.node.from_device(message)

    def _tell_up(self) -> None:
        self.known = DeviceInfo(
            self.name, "cpu", "cpu", 0, self.transport.address, "", 1, self.job_id, self.layout.epoch,
            self.commit.answered, self.counters.step, self.counters.round, self.holding, self.life,
        )  # fmt: skip

    def _measure(self, message: Any) -> None:
        self.world.after(0.02, self.tell, Measured(self.name, message.job, self.world.profile))

    def _deploy(self, message: Any) -> None:
        if message.source != "copy":
            self.world.begin_history(message.epoch)
        super()._deploy(message)

    def _begin_job(self, job_id: str, job: Job) -> Executor:
        self.job_id = job_id
        self.executor = SimExecutor(self, job_id, job)
        return self.executor

    def _release(self) -> None:
        self.executor, self.deployment, self.job_id = None, None, ""
        self.post.purge(lambda _: True)
        self._forget(self.transport.peers())


class SimExecutor(Executor):
    """The worker's executor; an update changes numbers, and the world sees every commit."""

    store: SimStore

    def __init__(self, sim: SimDevice, job_id: str, job: Job) -> None:
        self.sim = sim
        store: Any = SimStore(sim.world)
        corpus: Any = SimCorpus()
        super().__init__(sim.name, job_id, job, store, corpus, sim.post, sim.faults, sim.tell, sim.pulse)
        self.reducer = SimReducer(sim.name, store, sim.post, job.num_micro_batches, job.train.exact)
        self.reducer.world, self.reducer.step = sim.world, lambda: self.counters.step

    def adopt(self, layout: Layout, counters: Counters, order: Order = ()) -> None:
        super().adopt(layout, counters, order)
        assert self.store.weights()[0] == counters.applied, "stale state"

    def _passes(self, given: Given, *, forward_only: bool = False) -> Passes:
        return SimPasses(self.sim, self.means, given, self.reducer, forward_only=forward_only)

    def _apply(self, scale: float) -> None:
        assert self.reducer.complete, "an update of what is not reduced"
        for state in self.store.buckets.values():
            assert state.exponents[0] == self.counters.applied, f"updated twice: {state.exponents}"
            state.exponents = updated(state.exponents, self.counters.step, scale)
            self.faults.reach("update", self.counters.round)

    def _update(self, vote: Vote) -> Outcome:
        world, was = self.sim.world, self.counters
        assert sorted(vote.losses) == list(range(world.num_micro_batches)), "losses are incomplete"
        assert sorted(vote.norms) == list(range(len(world.buckets))), "norms are incomplete"
        outcome = super()._update(vote)
        world.committed(self.sim, was, outcome, self.store.weights())
        return outcome

    def write_checkpoint(self) -> None:
        live = frozenset(self.layout.holdings) - self.dead
        directory = str(checkpoint_dir(self.job, self.job_id, self.counters))
        buckets = self.store.spec.buckets
        for index, state in self.store.buckets.items():
            if writer_of(index, buckets[index].uses, self.layout, live) == self.device:
                self.sim.world.write(directory, index, state.exponents)
                self.faults.reach("checkpoint", self.counters.round)
                self.tell(
                    CheckpointPart(
                        self.device, self.job_id, self.counters, directory, index, len(buckets),
                        f"bucket-{index}", 1, "00", {},
                    )
                )  # fmt: skip
