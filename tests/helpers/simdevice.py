"""A device process of a simulated world: follows docs/recovery.md with virtual work instead of torch.

The real ``Commit`` (votes and fences), the real layouts and routes; forward and backward are delays. Training
state is a pair (updates applied, times the scales were squeezed) per layer, so that a wrong copy or a
wrong checkpoint shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from oobleckd.protocol.messages import (
    CheckpointPart,
    Decide,
    Deploy,
    Flag,
    Held,
    Inject,
    Measure,
    Measured,
    Progress,
    Ready,
    Release,
    Report,
    Resume,
    StepDone,
    ToWorker,
)
from oobleckd.protocol.parts import Counters, DeviceInfo, Flags, Vote
from planner.plan import Detours, Layers, Layout, Route, Segment, standing_routes
from worker.commit import Commit, outcome_of
from worker.tasks import order_of

if TYPE_CHECKING:
    from tests.helpers.world import SimNode, World

Task = tuple[str, int, int, int]  # kind (F or B), micro-batch, attempt, position in the route
Planned = tuple[str, int, int]  # kind, micro-batch, position
State = tuple[int, int]  # updates applied, squeezes


def loss_of(step: int, micro_batch: int) -> float:
    """The loss of a micro-batch: a pure function of the step, whoever computes it."""
    return 10.0 / (1 + step) + 0.001 * micro_batch


@dataclass
class SimDeployment:
    message: Deploy
    awaited: set[int] = field(default_factory=set)
    incoming: dict[int, State] = field(default_factory=dict)


class SimDevice:
    """One life of one device."""

    def __init__(self, world: World, node: SimNode, name: str) -> None:
        self.world, self.node, self.name = world, node, name
        self.life = f"life-{next(world.lives)}"
        self.alive = True
        # Copies may arrive before the Deploy that they belong to.
        self.transfers: list[tuple[int, int, State]] = []
        self.drop()
        # What the agent knows of it, for its Hello: told after every control message, as the real device does.
        self.known = self._info()

    def drop(self) -> None:
        """Release: no job."""
        self.job, self.spec = "", None
        self.layout = Layout(0, 0, {}, ())
        self.dead: frozenset[str] = frozenset()
        self.detours: Detours | None = None
        self.store: dict[int, State] = {}
        self.counters = Counters()
        self.flags, self.holding, self.hold_next = Flags(), True, False
        self.commit = Commit(self.name)
        self.deployment: SimDeployment | None = None
        self.routes: dict[int, Route] = {}
        self.expected: dict[int, set[int]] = {}
        self.tasks: list[tuple[Task, Segment, Route]] = []
        self.done: dict[int, set[int]] = {}
        self.reduced: set[int] = set()
        self.contributed: set[int] = set()
        self.heard: dict[int, dict[str, dict[int, frozenset[int]]]] = {}
        self.donors: dict[int, str] = {}
        self.letters: list[tuple[int, int, int, str, dict[int, frozenset[int]]]] = []
        self.arrived: set[tuple[int, *Task]] = set()
        self.ran: set[Task] = set()
        self.busy: Task | None = None
        self.work = getattr(self, "work", 0) + 1
        self.gradients = 0
        self.order: tuple[Planned, ...] = ()
        self.planned: list[Planned] = []
        self.followed = 0

    # ------------------------------------------------------------------ what it holds

    @property
    def held(self) -> Layers:
        return self.layout.holdings.get(self.name, Layers())

    def _info(self) -> DeviceInfo:
        return DeviceInfo(
            self.name, "cpu", "cpu", 0, f"{self.name}:1", "", 1, self.job, self.layout.epoch,
            self.commit.answered, self.counters.step, self.counters.round, self.holding, self.life,
        )  # fmt: skip

    def my_buckets(self) -> list[int]:
        return [b for b, uses in enumerate(self.world.buckets) if any(use in self.held for use in uses)]

    def my_uses(self, bucket: int) -> list[int]:
        return [use for use in self.world.buckets[bucket] if use in self.held]

    def holders(self, bucket: int) -> list[str]:
        uses = self.world.buckets[bucket]
        return sorted({d for use in uses for d in self.layout.holders(use)} & self.commit.live)

    @property
    def finished(self) -> bool:
        assert self.spec is not None
        return self.counters.step >= self.spec.train.steps

    # ------------------------------------------------------------------ controls

    def control(self, message: ToWorker) -> None:
        self._control(message)
        self.known = self._info()

    def _control(self, message: ToWorker) -> None:
        match message:
            case Measure():
                self.world.after(0.02, self.tell, Measured(self.name, message.job, self.world.profile))
            case Deploy():
                self._deploy(message)
            case Resume():
                self._resume(message)
            case Report():
                self._report(message)
            case Decide():
                self._decide(message)
            case Flag():
                if message.epoch >= self.commit.answered:
                    self.flags = Flags(
                        self.flags.hold or message.flags.hold,
                        self.flags.checkpoint or message.flags.checkpoint,
                    )
            case Release():
                if message.job == self.job:
                    self.drop()
            case Inject():
                pass
        self.poke()

    def tell(self, message) -> None:
        if self.alive:
            self.node.from_device(message)

    def _deploy(self, message: Deploy) -> None:
        if self.job and message.epoch <= self.commit.answered:
            return
        if message.job != self.job:
            self.drop()
            self.job, self.spec = message.job, message.spec
        deployment = self.deployment = SimDeployment(message)
        for transfer in message.transfers:
            if transfer.source == self.name:
                peer = self.world.device(transfer.target)
                if peer is not None:
                    self.world.send(
                        self, peer, "T", message.epoch, transfer.layer, self.store[transfer.layer]
                    )
        needed = message.layout.holdings.get(self.name, Layers()).layers()
        if message.source == "copy":
            deployment.awaited = {layer for layer in needed if layer not in self.store}
            coming = {t.layer for t in message.transfers if t.target == self.name}
            assert deployment.awaited <= coming, f"{self.name}: no source for {deployment.awaited - coming}"
        else:
            state = self.world.load(message.source, message.counters, message.epoch)
            deployment.incoming = dict.fromkeys(needed, state)
        self._advance()

    def copy(self, epoch: int, layer: int, state: State) -> None:
        self.transfers.append((epoch, layer, state))
        self._advance()

    def _advance(self) -> None:
        deployment = self.deployment
        if deployment is None:
            return
        waiting = bool(deployment.awaited)
        for epoch, layer, state in self.transfers:
            if epoch == deployment.message.epoch and layer in deployment.awaited:
                deployment.incoming[layer] = state
                deployment.awaited.discard(layer)
        if not deployment.awaited and (
            waiting or not deployment.incoming or deployment.message.source != "copy"
        ):
            copied = len(deployment.incoming) if deployment.message.source == "copy" else 0
            delay = self.world.random.uniform(0.0, 0.02)
            ready = Ready(self.name, deployment.message.epoch, copied)
            self.world.after(delay, self._ready, deployment, ready)

    def _ready(self, deployment: SimDeployment, ready: Ready) -> None:
        if self.deployment is deployment:
            self.tell(ready)

    def _adopt(self, epoch: int) -> None:
        deployment, self.deployment = self.deployment, None
        if deployment is None or deployment.message.epoch != epoch:
            return
        message = deployment.message
        needed = message.layout.holdings.get(self.name)
        if needed is None:
            self.drop()
            return
        self.store |= deployment.incoming
        self.store = {layer: self.store[layer] for layer in needed.layers()}
        squeezes = {state[1] for state in self.store.values()}
        assert {state[0] for state in self.store.values()} == {message.counters.applied}, "stale state"
        assert len(squeezes) == 1
        self.order = tuple(("B" if k == "I" else k, mb, p) for k, p, mb in order_of(message.ops) if k != "W")
        self.layout, self.dead, self.counters = message.layout, frozenset(), message.counters
        self.detours = None
        self.holding, self.hold_next, self.flags = True, False, Flags()
        self.transfers = [t for t in self.transfers if t[0] > epoch]
        self.commit.adopt(epoch, self.counters.round, self.layout.holdings)
        self._begin()

    def _resume(self, message: Resume) -> None:
        if self.deployment is not None and self.deployment.message.epoch == message.layout:
            self._adopt(message.layout)
        if self.job and self.layout.epoch == message.layout and not self.commit.frozen:
            self.holding = False

    def _report(self, message: Report) -> None:
        if self.deployment is not None and message.epoch > self.deployment.message.epoch:
            self._adopt(message.layout)
        if not self.job or self.layout.epoch != message.layout or not self.commit.report(message.epoch):
            return
        self.dead |= frozenset(message.dead)
        if self.dead:
            self.planned = []
        for route in self._standing():
            if route.touches(self.dead):
                self.routes.pop(route.micro_batch, None)
        self._expect()
        self.tell(
            Progress(
                self.name,
                message.epoch,
                self.counters,
                {layer: tuple(sorted(done)) for layer, done in self.done.items()},
                tuple(sorted(self.reduced)),
                self.commit.heard(),
                self.commit.last,
                self.holding,
            )
        )

    def _decide(self, message: Decide) -> None:
        live = frozenset(self.layout.holdings) - self.dead
        if not self.job or not self.commit.decide(message.epoch, live):
            return
        self.detours = message.detours
        if self.counters.round < message.round:
            assert message.commit is not None
            self._commit(message.commit)
        assert self.counters.round == message.round
        self._enter(message.donors)
        for route in message.routes:
            self.routes[route.micro_batch] = route
        self._expect()
        if message.hold_now or self.finished:
            if self.finished:
                self._checkpoint()
            self._hold()
            return
        self.hold_next, self.holding = message.hold, False
        if self.commit.own is not None:
            self._send_vote()

    # ------------------------------------------------------------------ a round

    def _begin(self) -> None:
        self.routes = {r.micro_batch: r for r in self._standing() if not r.touches(self.dead)}
        self._expect()
        self.done = {layer: set() for layer in self.held.layers()}
        self.reduced, self.ran, self.busy, self.gradients = set(), set(), None, 0
        self.work += 1
        self.planned = [] if self.dead else list(self.order)
        self.arrived = {key for key in self.arrived if key[0] >= self.counters.round}
        self._enter({})

    def _standing(self) -> tuple[Route, ...]:
        return standing_routes(self.layout, self.detours, self.counters.round)

    def _enter(self, donors: dict[int, str]) -> None:
        self.donors, self.contributed = dict(donors), set()
        self.heard = {bucket: {} for bucket in self.my_buckets()}

    def poke(self) -> None:
        """Everything that can be done at once; then the next task is begun."""
        while self.alive and self.job and not self.holding and self._once():
            pass
        if self.alive and self.job and not self.holding:
            self._start_task()

    def _once(self) -> bool:
        if self.commit.frozen:
            return False
        self._hear()
        for bucket in self.heard:
            if bucket not in self.contributed and self._may_contribute(bucket):
                self._contribute(bucket)
        if len(self.reduced) == len(self.heard) and self.commit.own is None:
            self._vote()
        vote = self.commit.committed()
        if vote is None:
            return False
        if self._commit(vote):
            self._hold()
        return True

    def _hear(self) -> None:
        here, later = (self.commit.epoch, self.counters.round), []
        for letter in self.letters:
            epoch, round_, bucket, source, ledger = letter
            if epoch > here[0] or round_ > here[1]:
                later.append(letter)
            elif (epoch, round_) == here and bucket in self.heard:
                self.heard[bucket][source] = ledger
                self._settle(bucket)
        self.letters = later

    def _expect(self) -> None:
        """The routes have changed: what this device is expected to add to which layer, and its tasks."""
        self.expected = {layer: set() for layer in self.held.layers()}
        self.tasks = []
        for mb, route in sorted(self.routes.items()):
            for position, segment in enumerate(route.segments):
                if segment.device == self.name:
                    for layer in segment.layers.layers():
                        if route.wants(layer):
                            self.expected[layer].add(mb)
                    self.tasks += [
                        ((kind, mb, route.attempt, position), segment, route) for kind in ("B", "F")
                    ]
        self.tasks.sort(key=lambda item: item[0])

    def _may_contribute(self, bucket: int) -> bool:
        if bucket in self.donors:
            return self.donors[bucket] == self.name
        return all(self.expected[use] <= self.done[use] for use in self.my_uses(bucket))

    def _contribute(self, bucket: int) -> None:
        self.contributed.add(bucket)
        if bucket in self.donors:
            whole = frozenset(range(self.world.num_micro_batches))
            ledger = dict.fromkeys(self.world.buckets[bucket], whole)
        else:
            ledger = {use: frozenset(self.done[use]) for use in self.my_uses(bucket)}
        for peer in self.holders(bucket):
            if peer != self.name:
                self._send(peer, "G", self.commit.epoch, self.counters.round, bucket, self.name, ledger)
        self.heard[bucket][self.name] = ledger
        self._settle(bucket)

    def _settle(self, bucket: int) -> None:
        sources = [self.donors[bucket]] if bucket in self.donors else self.holders(bucket)
        if bucket in self.reduced or not all(source in self.heard[bucket] for source in sources):
            return
        for use in self.world.buckets[bucket]:
            counted = sorted(mb for s in sources for mb in self.heard[bucket][s].get(use, ()))
            assert counted == list(range(self.world.num_micro_batches)), (
                f"{self.name} round {self.counters.round} bucket {bucket} layer {use}: {counted}"
            )
        self.reduced.add(bucket)

    def _vote(self) -> None:
        step, head = self.counters.step, self.world.num_layers - 1
        squeezes = next(iter(self.store.values()))[1]
        losses = {}
        if head in self.held:
            losses = {mb: loss_of(step, mb) for mb in range(self.world.num_micro_batches)}
        overflow = step in self.world.overflows and squeezes <= self.world.overflows.index(step)
        norms = {bucket: (float(bucket + step),) for bucket in self.heard}
        self.commit.cast(Vote(norms, losses, step in self.world.nans, overflow, self.flags))
        self._send_vote()

    def _send_vote(self) -> None:
        for peer in sorted(self.commit.live - {self.name}):
            self._send(peer, "V", self.commit.epoch, self.counters.round, self.name, self.commit.own)

    def _commit(self, vote: Vote) -> bool:
        outcome, was = outcome_of(vote), self.counters
        assert sorted(vote.losses) == list(range(self.world.num_micro_batches)), "losses are incomplete"
        assert sorted(vote.norms) == list(range(len(self.world.buckets))), "norms are incomplete"
        assert len(self.reduced) == len(self.heard), "committed what is not reduced"
        for layer, (applied, squeezes) in self.store.items():
            assert applied == was.applied
            self.store[layer] = (applied + (outcome == "applied"), squeezes + (outcome == "repeated"))
        loss = sum(vote.losses[mb] for mb in sorted(vote.losses)) / len(vote.losses)
        self.world.committed(self, was, outcome)
        self.tell(
            StepDone(
                self.name, self.job, self.commit.epoch, was, outcome, loss, 1.0, 0.1, self.world.num_micro_batches,
                f"ledger-{was.step}", 0.1, 0.1, self.gradients,
            )
        )  # fmt: skip
        self.counters = Counters(
            was.round + 1, was.step + (outcome != "repeated"), was.applied + (outcome == "applied")
        )
        hold = self.hold_next or vote.flags.hold or self.finished
        every = self.spec.checkpoint.every
        periodic = bool(every) and self.counters.step % every == 0 and outcome != "repeated"
        self.commit.advance(vote)
        self.flags, self.hold_next = Flags(), False
        self._begin()
        if periodic or vote.flags.checkpoint or self.finished:
            self._checkpoint()
        return hold

    def _hold(self) -> None:
        self.holding, self.busy = True, None
        self.work += 1
        self.tell(Held(self.name, self.commit.epoch, self.counters, self.finished))

    def _checkpoint(self) -> None:
        live = frozenset(self.layout.holdings) - self.dead
        directory = f"ckpt/{self.job}/step-{self.counters.step:08d}.partial"
        for bucket, uses in enumerate(self.world.buckets):
            holders = sorted({d for use in uses for d in self.layout.holders(use)} & live)
            if holders[bucket % len(holders)] == self.name:
                state = self.store[self.my_uses(bucket)[0]]
                self.world.write(directory, bucket, state)
                self.tell(
                    CheckpointPart(
                        self.name, self.job, self.counters, directory, bucket, len(self.world.buckets),
                        f"bucket-{bucket}", 1, "00", {},
                    )
                )  # fmt: skip

    # ------------------------------------------------------------------ forward and backward

    def _send(self, peer: str, *letter: object) -> None:
        target = self.world.device(peer)
        if target is not None:
            self.world.send(self, target, *letter)

    def letter(self, kind: str, *what) -> None:
        """Something arrived from a peer."""
        if kind == "T":
            self.copy(*what)
        elif kind == "G":
            self.letters.append(what)
        elif kind == "V":
            epoch, round_, device, vote = what
            self.commit.hear(device, epoch, round_, vote)
        else:
            self.arrived.add((*what[:1], kind, *what[1:]))
        self.poke()

    def _start_task(self) -> None:
        if self.busy is not None:
            return
        for task, segment, route in self.tasks:
            kind, mb, _, position = task
            if self.planned and self.planned[0] != (kind, mb, position):
                continue
            if task not in self.ran and self._can_run(task, route):
                if self.planned:
                    self.planned.pop(0)
                    self.followed += 1
                self.busy = task
                seconds = self.world.layer_s * len(segment.layers) * self.world.random.uniform(0.8, 1.2)
                self.world.after(seconds, self._ran, self.work, task, segment, route)
                return

    def _can_run(self, task: Task, route: Route) -> bool:
        kind, mb, attempt, position = task
        if kind == "F":
            arrived = position == 0 or (self.counters.round, *task) in self.arrived
            return arrived and (bool(self.planned) or not self._capped(route, len(route.segments) - position))
        if ("F", mb, attempt, position) not in self.ran:
            return False
        return position == len(route.segments) - 1 or (self.counters.round, *task) in self.arrived

    def _capped(self, route: Route, cap: int) -> bool:
        """1F1B as ``worker.tasks`` has it: what is as near to the end of its route or nearer counts."""
        flying = 0
        for (kind, mb, attempt, position), _, other in self.tasks:
            begun = kind == "F" and (kind, mb, attempt, position) in self.ran
            if begun and ("B", mb, attempt, position) not in self.ran and other.mask is None:
                flying += len(other.segments) - position <= cap
        return route.mask is None and flying >= cap

    def _ran(self, work: int, task: Task, segment: Segment, route: Route) -> None:
        if not self.alive or work != self.work or self.busy != task:
            return
        self.busy = None
        kind, mb, attempt, position = task
        if self.routes.get(mb) == route:
            self.ran.add(task)
            if kind == "B":
                for layer in segment.layers.layers():
                    if route.wants(layer):
                        assert mb not in self.done[layer], "counted twice"
                        self.done[layer].add(mb)
                        self.gradients += route.mask is not None
            step = 1 if kind == "F" else -1
            if 0 <= position + step < len(route.segments):
                peer = route.segments[position + step].device
                self._send(peer, kind, self.counters.round, mb, attempt, position + step)
        self.poke()
