"""Several engines in one process, stepped in a seeded order: every interleaving repeats from its seed.

Real executors, stores, models and the real ``decide``; only processes and sockets are left out. Tensor
messages arrive at once or late, devices advance in any order, and a device can die between any two pieces of
its work or at a named fault point.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from oobleckd.core.decide import LostLayers, Standing, decide
from oobleckd.planner.costs.work import StageWork
from oobleckd.planner.plan import (
    Detours,
    Layers,
    Layout,
    Pipeline,
    Range,
    Route,
    Segment,
    Transfer,
    holdings_of,
    shard_group,
)
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import LayerCost, Profile
from oobleckd.planner.reroute.reroute import reroute
from oobleckd.planner.schedule import format_ops
from oobleckd.planner.schedules.decoupled import decoupled
from oobleckd.planner.schedules.dispatch import RULES, dispatch
from oobleckd.planner.schedules.jobshop import shop_of, step_ops
from oobleckd.protocol.checkpointmessages import CheckpointPart
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import Deploy, FromWorker, Held, Progress, StepDone
from oobleckd.protocol.parts import Counters, EvalSum, Flags, RouterFigures
from oobleckd.worker.data.corpus import Corpus, open_corpus
from oobleckd.worker.messaging.gather import Gathering
from oobleckd.worker.models import ModelSpec, load_spec
from oobleckd.worker.reconfigure.deploy import Deployment
from oobleckd.worker.round_machine.tasks import Order, order_of
from oobleckd.worker.runtime.faults import Faults
from oobleckd.worker.state.store import Store
from oobleckd.worker.training.executor import Executor
from oobleckd.worker.transport.mailbox import Key, TensorMessage

Start = tuple[Counters, str]
"""The boundary at which training begins, and where its state comes from ("init", or a checkpoint)."""
FRESH: Start = (Counters(), "init")
Cuts = Sequence[tuple[int, ...]]
"""(first layer, the one behind the last) of each hop of a pipeline, and the number of its device where that
is not the hop's.
"""


class Died(Exception):
    """Raised inside a device at its fault point, in place of the real SIGKILL."""


class RaisingFaults(Faults):
    """Fault points that end the device's present piece of work instead of the process."""

    def strike(self, point: str, round_: int, *, hang: bool) -> None:
        raise Died(point)


@dataclass
class LocalMessenger:
    """The messenger of ``device``: messages lie in a dict until they are taken."""

    device: str
    world: World
    messages: dict[Key, TensorMessage] = field(default_factory=dict)
    gathering: Gathering | None = None

    def put(self, message: TensorMessage) -> None:
        self.messages[message.key] = self.gathering.without_sums(message) if self.gathering else message

    def gather(self, gathering: Gathering | None) -> None:
        self.gathering = gathering

    def send(self, peer: str, key: Key, tensors: Sequence[Tensor], meta: bytes = b"") -> None:
        # Copies, as a network makes: gradients that are given away are scaled in place at the commit.
        copies = [tensor.detach().clone() for tensor in tensors]
        self.world.deliver(self.device, peer, TensorMessage(key, self.device, meta, copies))

    def recall(self, peer: str, unwanted: Callable[[Key], bool]) -> list[Key]:
        return self.world.recall(self.device, peer, unwanted)

    def take(self, key: Key) -> TensorMessage | None:
        return self.messages.pop(key, None)

    def has(self, key: Key) -> bool:
        return key in self.messages

    def waiting(self) -> list[Key]:
        return list(self.messages)

    def purge(self, unwanted: Callable[[Key], bool]) -> None:
        self.messages = {key: message for key, message in self.messages.items() if not unwanted(key)}


@dataclass
class Node:
    """One device of the world."""

    messenger: LocalMessenger
    executor: Executor
    faults: RaisingFaults
    told: list[FromWorker] = field(default_factory=list)


class World:
    """Devices of one job, and a coordinator that does what the daemon does after a loss."""

    def __init__(
        self,
        job: Job,
        stages: dict[str, Cuts],
        seed: int,
        run_dir: Path,
        *,
        go_on: bool = False,
        redundant: bool = False,
        start: Start = FRESH,
        devices_per_stage: int = 1,
    ) -> None:
        self.go_on, self.redundant, self.start = go_on, redundant, start
        self.devices_per_stage = devices_per_stage
        self.parts: list[CheckpointPart] = []
        self.detours: Detours | None = None
        self.settled: set[str] = set()
        self.job, self.random, self.run_dir = job, random.Random(seed), run_dir
        self.spec: ModelSpec = load_spec(job)
        self.corpus: Corpus = open_corpus(job)
        self.nodes: dict[str, Node] = {}
        self.dead: set[str] = set()
        self.gone: set[str] = set()
        self.epoch = 1
        self.late: list[tuple[str, TensorMessage]] = []
        self.fired: list[tuple[str, str]] = []
        self.losses: dict[int, float] = {}
        self.routers: dict[int, dict[int, RouterFigures]] = {}
        self.experts: dict[int, dict[int, tuple[int, ...]]] = {}
        self.ledgers: dict[int, str] = {}
        self.evaluations: dict[tuple[int, int], tuple[EvalSum, ...]] = {}
        self.redone = self.forwards_again = 0
        self.gradients: dict[str, list[tuple[int, int]]] = {}
        self.in_stage: dict[str, list[tuple[int, int]]] = {}
        self.progress: dict[str, Progress] = {}
        self.controls: list[tuple[str, Callable[[Executor], None]]] = []
        self.reports: list[tuple[str, Callable[[Executor], None]]] = []
        self.answered_meanwhile = 0
        self.on_loss: Callable[[World], None] | None = None
        self.first = self.layout = self._layout(stages)
        for device in sorted(self.layout.holdings):
            self._add(device)
        for device in self.nodes:
            self._begin(device)
        for node in self.nodes.values():
            node.executor.resume()

    def _layout(self, stages: dict[str, Cuts]) -> Layout:
        pipelines = [
            tuple(
                Segment(f"{name}{[*cut[2:], i][0]}/{rank}", Range(cut[0], cut[1]))
                for i, cut in enumerate(cuts)
            )
            for name, cuts in stages.items()
            for rank in range(self.devices_per_stage)
        ]
        routes = tuple(
            Route(mb, self.epoch, pipelines[mb % len(pipelines)]) for mb in range(self.job.num_micro_batches)
        )
        holdings = holdings_of(s for p in pipelines for s in p)
        redundant = {
            segment.device: Layers.of(segments[(at + 1) % len(segments)].layers)
            for segments in pipelines
            for at, segment in enumerate(segments)
            if self.redundant and len(segments) > 1
        }
        held = {
            device: layers.and_those(redundant.get(device, Layers())) for device, layers in holdings.items()
        }
        return Layout(
            self.epoch,
            self.spec.num_layers,
            held,
            routes,
            redundant,
            devices_per_stage=self.devices_per_stage,
        )

    def _add(self, device: str) -> None:
        messenger, faults = LocalMessenger(device, self), RaisingFaults(device, self.run_dir)
        store = Store(self.spec, torch.device("cpu"))
        told: list[FromWorker] = []
        executor = Executor(
            device, "job", self.job, store, self.corpus, messenger, faults, told.append,
            released=lambda: self._released(device),
        )  # fmt: skip
        counters, source = self.start
        deploy = Deploy(device, 1, "job", self.job, self.layout, counters, source, (), {}, "", "")
        deployment = Deployment(deploy, store, messenger, faults)
        deployment.start()
        deployment.adopt()
        self.nodes[device] = Node(messenger, executor, faults, told)

    def _begin(self, device: str) -> None:
        """Take the first layout into force: all are there by now."""
        self.nodes[device].executor.adopt(self.layout, self.start[0], self._order(device))

    def _order(self, device: str) -> Order:
        """As the planner has it, for equal layers, where the backward is decoupled."""
        if not self.job.schedule.apart:
            return ()
        segments = next(r.segments for r in self.layout.routes if r.touches([device]))
        mine = tuple(r.micro_batch for r in self.layout.routes if r.touches([device]))
        works = [StageWork(*[0.01 * len(s.layers)] * 3, limit_bytes=9, activation_bytes=1) for s in segments]
        pipeline = Pipeline((), segments, mine)
        ops = decoupled(works, mine, 2000, pipeline.chunks)
        return order_of(format_ops(ops[pipeline.devices.index(device)]))

    # ------------------------------------------------------------------ messages

    def deliver(self, _source: str, peer: str, message: TensorMessage) -> None:
        if peer in self.dead | self.gone:
            return
        if self.random.random() < 0.3:
            self.late.append((peer, message))
        else:
            self.nodes[peer].messenger.put(message)

    def deliver_late(self) -> None:
        if self.late:
            peer, message = self.late.pop(self.random.randrange(len(self.late)))
            if peer in self.live():
                self.nodes[peer].messenger.put(message)

    def recall(self, _source: str, peer: str, unwanted: Callable[[Key], bool]) -> list[Key]:
        """Tensor messages that have not been delivered may not have left either."""
        taken = [
            each
            for each in self.late
            if each[0] == peer and unwanted(each[1].key) and self.random.random() < 0.5
        ]
        self.late = [each for each in self.late if all(each is not other for other in taken)]
        return [message.key for _, message in taken]

    # ------------------------------------------------------------------ running

    def live(self) -> list[str]:
        return [device for device in sorted(self.nodes) if device not in self.dead | self.gone]

    def run(self, limit: int = 200_000) -> None:
        """Until every live device holds; asserts that nothing is stuck."""
        idle = 0
        for _ in range(limit):
            worked = self.step()
            idle = 0 if worked or self.late or self.controls else idle + 1
            if idle > 20 * len(self.live()):
                if not self._held_early():
                    break
                if self.go_on:
                    self._resume()
                else:
                    self._lay_out_again()
                idle = 0
        holding = [self.nodes[device].executor.holding for device in self.live()]
        assert all(holding), f"stuck: {dict(zip(self.live(), holding, strict=True))}"

    def step(self) -> bool:
        """One thing that happens; whether a device did something."""
        if self.controls and self.random.random() < 0.3:
            device, act = self.controls.pop(0)
            self._in(device, act)
        elif self.random.random() < 0.3:
            self.deliver_late()
        device = self.random.choice(self.live())
        worked = self._in(device, Executor.advance)
        self._listen()
        return worked

    def _held_early(self) -> bool:
        executors = [self.nodes[device].executor for device in self.live()]
        return all(e.holding for e in executors) and not all(e.machine.finished for e in executors)

    def _resume(self) -> None:
        """Detours stay: the same layout from this boundary."""
        for device in self.live():
            self.nodes[device].executor.resume()

    def _lay_out_again(self) -> None:
        """What a new plan does, without copies: the dead one's micro-batches stay re-routed, mostly in an
        order for all.
        """
        self.epoch += 1
        gone = self.layout.unable(self.dead)
        broken = {
            r.micro_batch: tuple(range(self.spec.num_layers)) for r in self.layout.routes if r.touches(gone)
        }
        kept = [r for r in self.layout.routes if r.micro_batch not in broken]
        routes = [*kept, *reroute(self.layout, gone, broken, self.epoch)]
        standing = tuple(
            Route(r.micro_batch, self.epoch, r.segments) for r in sorted(routes, key=lambda r: r.micro_batch)
        )
        holdings = {d: held for d, held in self.layout.holdings.items() if d not in gone}
        redundant = {d: held for d, held in self.layout.redundant.items() if d not in gone}
        each = self.devices_per_stage
        self.layout = Layout(
            self.epoch, self.spec.num_layers, holdings, standing, redundant, devices_per_stage=each
        )
        self.gone |= gone
        self.dead = set()
        orders = self._orders() if self.random.random() < 0.8 else {}
        for device in self.live():
            executor = self.nodes[device].executor
            executor.adopt(self.layout, executor.counters, orders.get(device, ()))
            executor.resume()

    def reshard(self, stages: Sequence[Sequence[tuple[str, Range]]], devices_per_stage: int) -> None:
        """Lay out anew at this boundary, with copies: pipelines of these hops, each named by the first device
        of its stage, of which there are so many.
        """
        self.epoch += 1
        before, each = self.layout, devices_per_stage
        lanes = [
            tuple(Segment(shard_group(device, each)[rank], layers) for device, layers in hops)
            for hops in stages
            for rank in range(each)
        ]
        routes = [Route(mb, self.epoch, lanes[mb % len(lanes)]) for mb in range(self.job.num_micro_batches)]
        holdings = holdings_of(segment for lane in lanes for segment in lane)
        self.layout = Layout(
            self.epoch, self.spec.num_layers, holdings, tuple(routes), devices_per_stage=each
        )
        transfers = tuple(
            Transfer(layer, source, target, 1)
            for target, layers in sorted(holdings.items())
            for layer in layers.layers()
            for source in self._a_copy(before, layer)
            if source != target
        )
        counters = next(iter(self.nodes.values())).executor.counters
        deployments = {}
        for device in self.live():
            node = self.nodes[device]
            message = Deploy(
                device, self.epoch, "job", self.job, self.layout, counters, "copy", transfers, {}, "", "",
                held_per_stage=before.devices_per_stage,
            )  # fmt: skip
            deployments[device] = Deployment(message, node.executor.store, node.messenger, node.faults)
            deployments[device].start()
        while any(deployment.awaited for deployment in deployments.values()):
            self.deliver_late()
            for deployment in deployments.values():
                deployment.advance()
        self.devices_per_stage, self.gone, self.dead = each, self.gone | self.dead, set()
        for device, deployment in deployments.items():
            deployment.adopt()
            if deployment.layers is None:
                self.gone.add(device)
            else:
                self.nodes[device].executor.adopt(self.layout, counters)
        for device in self.live():
            self.nodes[device].executor.resume()

    def _a_copy(self, layout: Layout, layer: int) -> list[str]:
        """A live holder of every shard of ``layer``."""
        found = {layout.rank(device): device for device in layout.holders(layer) if device in self.live()}
        assert len(found) == layout.devices_per_stage
        return [found[rank] for rank in sorted(found)]

    def _orders(self) -> dict[str, Order]:
        """Where routes cross, as the planner has it for equal layers."""
        schedule, spec = self.job.schedule, self.spec
        layer = LayerCost("layer", 0.01, 0.02, 1, 1, 1, 0, weight_s=0.01, kept_bytes=1)
        profile = Profile(
            "engine", "cpu", (layer,) * spec.num_layers, buckets=tuple(b.uses for b in spec.buckets)
        )
        setup = Setup(
            profile, self.job.num_micro_batches, 1, 0, 1, 1,
            decoupled=schedule.apart, staggered=schedule.update == "staggered",
        )  # fmt: skip
        shop = shop_of(self.layout, setup)
        orders = self.random.choice(dispatch(shop, self.random.choice(RULES), 2).orders)
        return {device: order_of(format_ops(ops)) for device, ops in step_ops(shop, orders).items()}

    def _in(self, device: str, act: Callable[[Executor], object]) -> bool:
        if device not in self.live():
            return False
        try:
            return bool(act(self.nodes[device].executor))
        except Died as died:
            self.fired.append((device, str(died)))
            self.kill(device)
            return True

    @contextmanager
    def _released(self, device: str) -> Iterator[None]:
        """``device`` computes a layer; a report may reach it meanwhile, as the real one's link answers
        (``oobleckd.worker.device.device``).
        """
        yield
        executor = self.nodes[device].executor
        mine = [control for control in self.controls if control[0] == device]
        if mine and mine[0] in self.reports and executor.early is None and self.random.random() < 0.7:
            self.controls.remove(mine[0])
            self.answered_meanwhile += 1
            mine[0][1](executor)

    def _listen(self) -> None:
        for device in self.live():
            told = self.nodes[device].told
            while told:
                self._hear(device, told.pop(0))

    def _hear(self, device: str, message: FromWorker) -> None:
        match message:
            case StepDone():
                sent = message.gradient_messages, message.gradient_bytes
                self.gradients.setdefault(device, []).append(sent)
                shared = message.gathered_bytes, message.shard_gradient_bytes
                self.in_stage.setdefault(device, []).append(shared)
                if message.outcome == "evaluated":
                    at = (message.counters.step, message.counters.evaluated)
                    assert self.evaluations.setdefault(at, message.evaluated) == message.evaluated
                elif message.outcome != "repeated":
                    step = message.counters.step
                    assert self.losses.setdefault(step, message.loss) == message.loss
                    assert self.ledgers.setdefault(step, message.ledger) == message.ledger
                    assert self.routers.setdefault(step, message.routers) == message.routers
                    for layer, tokens in message.experts.items():
                        assert self.experts.setdefault(step, {}).setdefault(layer, tokens) == tokens
                self.redone += message.layer_gradients
                self.forwards_again += message.layer_forwards
            case Progress() if message.epoch == self.epoch:
                self.progress[device] = message
                if set(self.progress) == set(self.live()):
                    self._decide()
            case CheckpointPart():
                self.parts.append(message)
            case Held() | _:
                pass

    # ------------------------------------------------------------------ losses

    def kill(self, *devices: str) -> None:
        """``devices`` are dead from now on; survivors are told."""
        self.dead |= set(devices)
        self._report()

    def _report(self) -> None:
        self.epoch += 1
        self.progress = {}
        epoch, dead = self.epoch, tuple(sorted(self.dead))
        for device in self.random.sample(self.live(), len(self.live())):
            report = (device, lambda e, epoch=epoch, dead=dead: e.report(epoch, dead))
            self.controls.append(report)
            self.reports.append(report)

    def _decide(self) -> None:
        uses = [bucket.uses for bucket in self.spec.buckets]
        standing = Standing(self.detours, tuple(sorted(self.settled)), self.go_on)
        rounds = self.job.eval_rounds
        verdict = decide(self.epoch, self.progress, self.layout, self.dead, uses, rounds, standing)
        assert not isinstance(verdict, LostLayers), verdict
        if verdict.detours is not None:
            self.detours, self.settled = verdict.detours, set(self.dead)
        for device in self.random.sample(self.live(), len(self.live())):
            message = verdict.told(device, self.epoch, self.detours)
            self.controls.append((device, lambda e, message=message: e.decide(message)))

    # ------------------------------------------------------------------ results

    def weights(self) -> dict[str, Tensor]:
        """Every parameter; asserts that all copies are equal to the bit."""
        found: dict[str, Tensor] = {}
        parts: dict[tuple[int, int, int], Tensor] = {}
        for device in self.live():
            store = self.nodes[device].executor.store
            for bucket, state in store.buckets.items():
                for (key, begin, _), param in zip(store.shard(bucket).parts, state.params, strict=True):
                    part = parts.setdefault((bucket, key, begin), param.detach())
                    assert torch.equal(part, param.detach()), self.spec.buckets[bucket].keys[key]
        for bucket in self.spec.buckets:
            for number, (key, shape) in enumerate(zip(bucket.keys, bucket.shapes, strict=True)):
                mine = sorted(place for place in parts if place[:2] == (bucket.index, number))
                flat = torch.cat([parts[place].reshape(-1) for place in mine])
                found[key] = flat.view(shape)
        return found


def flag_all(world: World, flags: Flags) -> None:
    """Ask every live device for ``flags`` at its next vote."""
    for device in world.live():
        world.nodes[device].executor.machine.flags = msgspec.structs.replace(flags)
