"""The model check: every interleaving of three devices, each a real ``RoundMachine``, and the real
``decide``.

Either ``A`` and ``B`` hold layer 0 (one micro-batch each) and ``C`` layer 1 (both), or all three are
replicas, or ``B`` holds the layer of ``A``, too. A piece of a device's work is an action, and so is the
arrival of a message: what a task waits for is always here, so that computing is held up by nothing, and a
copy of sums may go out at any time. Messages between two ends arrive in order, those of different ends in any
order; a message of a dead device that is on its way may arrive or not. The daemon's messages of different
epochs may overtake each other, as they could if it was restarted in between.

What is here is the shell of a machine without sums: ``weights`` say which update they are of. A machine is
pure, so what it makes of an event is the same in every world in which it stands where it stands: it is asked
once, and after that looked up. That is what lets the machine of production be walked through millions of
states.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from oobleckd.core.decide import Decision, LostLayers, Standing, decide
from oobleckd.planner.plan import Detours
from oobleckd.protocol.evalrounds import EvalRounds
from oobleckd.protocol.messages import Decide, Progress
from oobleckd.protocol.parts import Counters, Vote
from oobleckd.worker.round_machine.commands import (
    CastVote,
    Command,
    CommitRound,
    Contribute,
    Give,
    RollBack,
    RunTask,
    SendVote,
    Tell,
    UpdateEarly,
)
from oobleckd.worker.round_machine.copies import SumCopy
from oobleckd.worker.round_machine.exchange import Contribution, Given
from oobleckd.worker.round_machine.machine import RoundMachine, Rules
from oobleckd.worker.round_machine.tasks import Task
from tests.helpers.commit_states import (
    DEVICES,
    FLUSHED,
    NONE,
    REPLICATED_AND_NOT,
    Evaluations,
    Setting,
    Staggered,
    Topology,
    key_of,
)

Message = tuple[Any, ...]
Sent = tuple[tuple[str, Message], ...]
"""(target, message), in the order in which they leave."""
VOTE = Vote({}, {})
"""Votes are pure functions of the round: the model only needs to know that there is one."""
_CONSTANT = frozenset({"device", "rules", "goes_through", "judge", "layout", "order"})
GONE = -1
"""In place of the state of a dead device."""


class Violation(AssertionError):
    """The protocol broke a promise."""


def evaluated(rounds: EvalRounds, counters: Counters, micro_batches: Iterable[int]) -> dict[int, float]:
    """Losses of a round that evaluates: of every micro-batch and step another."""
    first = rounds.micro_batches(counters).start
    return {mb: 1000.0 * counters.step + first + mb for mb in micro_batches}


def always(*_: object) -> bool:
    """What a task waits for is here, and what it sent can be sent again."""
    return True


@dataclass(frozen=True)
class GoesThrough:
    """Whether gradients are what devices thought they were."""

    through: bool

    def __call__(self, _vote: Vote) -> bool:
        return self.through


class Device:
    """A machine, and what stands for tensors: ``weights``: (the update that they are of, "" or "wrong"),
    those ``saved`` before an early one, and the ``mail`` that waits for its time.
    """

    def __init__(self, name: str, setting: Setting) -> None:
        top, staggered = setting.topology, setting.staggered
        rules = Rules(
            setting.evaluation,
            staggered=staggered.on,
            copies=int(setting.copying),
            check_every=int(setting.twice),
        )
        numbers = [top.numbers] * len(top.uses)
        self.machine = RoundMachine(name, rules, top.uses, GoesThrough(staggered.through), numbers=numbers)
        self.machine.predictor.saw(through=True)
        self.weights, self.saved = (0, ""), None
        self.mail: tuple[Message, ...] = ()
        self.machine.adopt(top.layout, Counters())
        self.machine.resume()

    def key(self) -> Hashable:
        """Equal for equal states."""
        state = vars(self.machine)
        return (
            self.machine.device,
            tuple(key_of(state[name]) for name in sorted(state) if name not in _CONSTANT),
            self.weights,
            self.saved,
            tuple(sorted(self.mail)),
        )

    # ------------------------------------------------------------------ events

    def work(self) -> Sent | None:
        """One piece of work, or of a step all computing up to the next gradient; None: there is none."""
        sent: list[tuple[str, Message]] = []
        counted = self.machine.now.board.ledger.totals
        while commands := self.machine.next(always, always):
            sent += self._obey(commands)
            board = self.machine.now.board
            apart = board.evaluates or board.ledger.totals != counted
            if apart or not isinstance(commands[0], RunTask):
                return (*sent, *self._read_mail())
            if commands[0].early:
                return ()
        return tuple(sent) if sent else None

    def hear(self, source: str, message: Message) -> Sent:
        """A message has arrived."""
        sent: Sent = ()
        match message:
            case ("V", int(epoch), int(round_), bytes() as vote):
                self.machine.commit.hear(source, epoch, round_, msgspec.msgpack.decode(vote, type=Vote))
            case ("G" | "M" | "C", *_):
                self.mail = (*self.mail, (*message, source))
            case ("report", int(epoch), tuple() as dead):
                sent = tuple(self._obey(self.machine.report(epoch, dead, always, always)))
            case ("D", bytes() as data):
                sent = tuple(self._obey(self.machine.decide(msgspec.msgpack.decode(data, type=Decide))))
        return (*sent, *self._read_mail())

    def _read_mail(self) -> Sent:
        """Sums and copies whose time has come; what is over is thrown away."""
        mail, self.mail = self.mail, ()
        found: list[tuple[str, Message]] = []
        for message in mail:
            sent: Sent = ()
            match message[0]:
                case "G":
                    fate, sent = self._sums(*message[1:])
                case "M":
                    fate = self._means(*message[1:])
                case _:
                    fate = self._copy(*message[1:])
            found += sent
            if fate in {"later", "wait"}:
                self.mail = (*self.mail, message)
        return tuple(found)

    def _sums(self, epoch: int, round_: int, bucket: int, data: bytes, source: str) -> tuple[str, Sent]:
        fence = self.machine.fence(epoch, round_)
        if fence != "now":
            return fence, ()
        what = msgspec.msgpack.decode(data, type=Contribution)
        return fence, tuple(self._hear(bucket, source, what))

    def _hear(self, bucket: int, source: str, what: Contribution) -> Iterator[tuple[str, Message]]:
        exchange = self.machine.exchange
        if exchange.wants(bucket, source):
            give = exchange.hear(bucket, source, what)
            if give is not None:
                yield from self._give(give)

    def _give(self, command: Give) -> Iterator[tuple[str, Message]]:
        exchange, bucket = self.machine.exchange, command.bucket
        for peer in command.peers:
            given = msgspec.msgpack.encode(exchange.of_means(bucket, command.slices))
            yield peer, ("M", exchange.epoch, exchange.round, bucket, given)

    def _means(self, epoch: int, round_: int, bucket: int, data: bytes, source: str) -> str:
        fence, exchange = self.machine.fence(epoch, round_), self.machine.exchange
        if fence == "now" and exchange.wants_means(bucket, source):
            exchange.hear_means(bucket, source, msgspec.msgpack.decode(data, type=Given))
        return fence

    def _copy(self, layout: int, round_: int, data: bytes, source: str) -> str:
        copies = self.machine.copies
        fate = copies.fate(source, layout, round_)
        if fate == "keep":
            copies.held[source] = msgspec.msgpack.decode(data, type=SumCopy)
        return fate

    # ------------------------------------------------------------------ commands

    def _obey(self, commands: tuple[Command, ...]) -> Iterator[tuple[str, Message]]:
        for command in commands:
            match command:
                case RunTask():
                    yield from self._run(command)
                case Contribute():
                    yield from self._contribute(command)
                case Give():
                    yield from self._give(command)
                case CastVote():
                    yield from self._obey(self.machine.cast(self._vote()))
                case SendVote():
                    vote = msgspec.msgpack.encode(command.vote)
                    for peer in command.peers:
                        yield peer, ("V", command.epoch, command.round, vote)
                case UpdateEarly():
                    self.saved = self.weights
                    self.weights = (self.weights[0] + 1, "" if self.machine.goes_through(VOTE) else "wrong")
                case RollBack():
                    self._roll_back()
                case CommitRound():
                    self._commit(command)
                case Tell():
                    assert isinstance(command.message, Progress)
                    yield "daemon", ("P", msgspec.msgpack.encode(command.message))

    def _run(self, command: RunTask) -> Iterator[tuple[str, Message]]:
        machine, kind, task = self.machine, command.kind, command.task
        spec = machine.ahead if command.early else machine.now
        assert spec is not None
        if self.weights[0] != spec.counters.applied or (self.weights[1] and not command.early):
            raise Violation(f"{machine.device} computes {spec.counters} with weights {self.weights}")
        if kind == "F":
            spec.board.ran_forward(task)
            return
        assert kind == "B"
        self._count(task)
        spec.board.ran_backward(task)
        if machine.rules.copies:
            yield from self._copies()

    def _count(self, task: Task) -> None:
        for layer in task.layers.layers():
            if task.route.wants(layer):
                self.machine.now.board.ledger.count(layer, task.route.micro_batch)

    def _copies(self) -> Iterator[tuple[str, Message]]:
        """To every keeper, whether or not it has said that it has the one before."""
        copies, ledger = self.machine.copies, self.machine.now.board.ledger
        for keeper, layers in copies.to_send():
            data = msgspec.msgpack.encode(SumCopy(ledger.counted(layers), (), (), {}))
            yield keeper, ("C", copies.layout, copies.round, data)

    def _contribute(self, command: Contribute) -> Iterator[tuple[str, Message]]:
        machine, exchange, bucket = self.machine, self.machine.exchange, command.bucket
        ledger = exchange.counted(bucket)
        rounds, now, here = machine.rules.evaluation, machine.counters, ledger.get(exchange.head, ())
        losses = evaluated(rounds, now, here) if exchange.num_evaluated else {}
        what = Contribution(ledger, losses)
        for peer, _ in command.shares:
            yield peer, ("G", exchange.epoch, exchange.round, bucket, msgspec.msgpack.encode(what))
        yield from self._hear(bucket, exchange.device, what)

    def _vote(self) -> Vote:
        """Of a step nothing matters but that there is one; of an evaluation the losses that are here."""
        exchange = self.machine.exchange
        lacking = [b for b in exchange.held if exchange.here[b] != exchange.all_of(b)]
        if lacking:
            raise Violation(f"{self.machine.device} votes without means of all of {lacking}")
        if not self.machine.now.board.evaluates:
            return VOTE
        return Vote(
            {}, {mb: of for what in self.machine.exchange.reduced.values() for mb, of in what.losses.items()}
        )

    def _roll_back(self) -> None:
        assert self.saved is not None
        self.weights, self.saved = self.saved, None

    def _commit(self, command: CommitRound) -> None:
        if command.taken_back:
            self._roll_back()
        if command.early:
            self.saved = None
        else:
            rounds = self.machine.rules.evaluation
            num_evaluated = rounds.num_evaluated(command.was)
            self.weights = (self.weights[0] + (not num_evaluated), self.weights[1])
            if num_evaluated and command.vote.losses != evaluated(rounds, command.was, range(num_evaluated)):
                raise Violation(f"{self.machine.device} commits {command.was} with {command.vote.losses}")
        if self.weights != (self.machine.counters.applied, ""):
            raise Violation(f"{self.machine.device} commits {command.was} and has weights {self.weights}")


@dataclass(frozen=True)
class Daemon:
    """What the daemon knows. ``detours``: around those ``settled``, without whom the job goes on; ``over``:
    no live device holds some layer.
    """

    dead: tuple[str, ...] = ()
    epoch: int = 1
    progress: tuple[tuple[str, bytes], ...] = ()
    over: bool = False
    detours: bytes = b""
    settled: tuple[str, ...] = ()

    @property
    def live(self) -> list[str]:
        """Devices that are not dead."""
        return [device for device in DEVICES if device not in self.dead]

    def lost(self, name: str) -> tuple[Daemon, Sent]:
        """``name`` has died: it notices, and reports."""
        after = Daemon(
            tuple(sorted({*self.dead, name})), self.epoch + 1, (), self.over, self.detours, self.settled
        )
        return after, tuple((peer, ("report", after.epoch, after.dead)) for peer in after.live)

    def hear(self, source: str, data: bytes, setting: Setting) -> tuple[Daemon, Sent]:
        """An answer: decide when all survivors have given theirs."""
        if msgspec.msgpack.decode(data, type=Progress).epoch != self.epoch:
            return self, ()
        progress = {**dict(self.progress), source: data}
        if set(progress) != set(self.live):
            told = tuple(sorted(progress.items()))
            return Daemon(self.dead, self.epoch, told, self.over, self.detours, self.settled), ()
        known = msgspec.msgpack.decode(self.detours, type=Detours) if self.detours else None
        top = setting.topology
        answers = {name: msgspec.msgpack.decode(data, type=Progress) for name, data in progress.items()}
        standing = Standing(known, self.settled, setting.go_on)
        verdict = decide(self.epoch, answers, top.layout, self.dead, top.uses, setting.evaluation, standing)
        if isinstance(verdict, LostLayers):
            return Daemon(self.dead, self.epoch, (), True, self.detours, self.settled), ()
        assert isinstance(verdict, Decision)
        detours, settled = self.detours, self.settled
        if verdict.detours is not None:
            known, settled = verdict.detours, self.dead
            detours = msgspec.msgpack.encode(known)
        told_all = tuple(
            (name, ("D", msgspec.msgpack.encode(verdict.told(name, self.epoch, known)))) for name in self.live
        )
        return Daemon(self.dead, self.epoch, (), False, detours, settled), told_all


# A state of the world: the numbers of the devices' states, the daemon's, and what is on the wires.
Wire = tuple[tuple[str, str], tuple[int, ...]]
State = tuple[tuple[int, ...], Daemon, tuple[Wire, ...]]
Answer = tuple[int, tuple[tuple[str, int], ...]] | None


@dataclass
class Walk:
    """A walk through every state of a ``setting`` with at most so many ``deaths``.

    ``states``: of devices, pickled, by number. ``answers``: (number, event) -> what comes of it; ``told``:
    the same of the daemon, which hears a message from a device.
    """

    setting: Setting
    deaths: int
    states: list[bytes] = field(default_factory=list)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    message_numbers: dict[Message, int] = field(default_factory=dict)
    answers: dict[tuple[int, object], Answer] = field(default_factory=dict)
    told: dict[tuple[Daemon, str, int], tuple[Daemon, Sent]] = field(default_factory=dict)
    ends: int = 0

    def number(self, device: Device) -> int:
        """Of its state."""
        key = device.key()
        if key not in self.numbers:
            self.numbers[key] = len(self.states)
            self.states.append(pickle.dumps(device))
        return self.numbers[key]

    def named(self, message: Message) -> int:
        """A message's number."""
        if message not in self.message_numbers:
            self.message_numbers[message] = len(self.messages)
            self.messages.append(message)
        return self.message_numbers[message]

    def of(self, state: int, event: object, act: Callable[[Device], Sent | None]) -> Answer:
        """What ``event`` does with a device in a state: its next state and what it sends."""
        key = (state, event)
        if key not in self.answers:
            device: Device = pickle.loads(self.states[state])
            sent = act(device)
            found = None if sent is None else tuple((target, self.named(what)) for target, what in sent)
            self.answers[key] = None if found is None else (self.number(device), found)
        return self.answers[key]

    # ------------------------------------------------------------------ actions

    def start(self) -> State:
        """Nothing done yet."""
        return tuple(self.number(Device(name, self.setting)) for name in DEVICES), Daemon(), ()

    def moves(self, state: State) -> Iterator[State]:
        """Every state that one action leads to, but for those of a death."""
        devices, daemon, wires = state
        if daemon.over:
            return
        for place, number in enumerate(devices):
            if number != GONE and (answer := self.of(number, "work", Device.work)) is not None:
                yield self._after(state, wires, place, answer)
        for at, ((source, target), (first, *rest)) in enumerate(wires):
            left = (*wires[:at], *((((source, target), tuple(rest)),) if rest else ()), *wires[at + 1 :])
            if target == "daemon":
                yield self._told(state, left, source, first)
                continue
            place = DEVICES.index(target)

            def heard(device: Device, source: str = source, first: int = first) -> Sent:
                return device.hear(source, self.messages[first])

            answer = self.of(devices[place], (source.partition(" ")[0], first), heard)
            assert answer is not None
            yield self._after(state, left, place, answer)

    def deaths_of(self, state: State) -> Iterator[State]:
        """Every state that one more death leads to."""
        devices, daemon, wires = state
        if daemon.over or len(daemon.dead) >= self.deaths:
            return
        for place, name in enumerate(DEVICES):
            if name in daemon.dead:
                continue
            after, sent = daemon.lost(name)
            left = tuple(w for w in wires if w[0][1] != name and w[0] != (name, "daemon"))
            numbered = tuple((target, self.named(message)) for target, message in sent)
            gone = (*devices[:place], GONE, *devices[place + 1 :])
            yield gone, after, _post(left, f"daemon {after.epoch}", numbered, after.dead)

    def _after(self, state: State, wires: tuple[Wire, ...], place: int, answer: Answer) -> State:
        devices, daemon, _ = state
        assert answer is not None
        number, sent = answer
        if sent:
            wires = _post(wires, DEVICES[place], sent, daemon.dead)
        if number != devices[place]:
            devices = (*devices[:place], number, *devices[place + 1 :])
        return devices, daemon, wires

    def _told(self, state: State, wires: tuple[Wire, ...], source: str, message: int) -> State:
        devices, daemon, _ = state
        key = (daemon, source, message)
        if key not in self.told:
            self.told[key] = daemon.hear(source, self.messages[message][1], self.setting)
        after, sent = self.told[key]
        if sent:
            numbered = tuple((target, self.named(what)) for target, what in sent)
            wires = _post(wires, f"daemon {after.epoch}", numbered, after.dead)
        return devices, after, wires

    # ------------------------------------------------------------------ the walk

    def run(self) -> int:
        """Walk; returns how many states there are. Raises Violation, also for a stuck state."""
        first = self.start()
        seen: dict[State, State | None] = {first: None}
        frontier = [first]
        while frontier:
            state = frontier.pop()
            try:
                moves = list(self.moves(state))
                if not moves:  # a state that only a death can leave is an end
                    self.ends += 1
                    self._check_end(state)
                for following in (*moves, *self.deaths_of(state)):
                    if following not in seen:
                        seen[following] = state
                        frontier.append(following)
            except AssertionError as error:
                raise Violation(f"{error}\n{self._history(state, seen)}") from error
        return len(seen)

    def _check_end(self, state: State) -> None:
        devices, daemon, _ = state
        if daemon.over:
            return
        machines = [pickle.loads(self.states[n]).machine for n in devices if n != GONE]
        counters = {machine.counters for machine in machines}
        ended = bool(daemon.dead) or all(machine.finished for machine in machines)
        if len(counters) > 1 or not ended or not all(machine.phase == "held" for machine in machines):
            stuck = {machine.device: (machine.phase, machine.counters.round) for machine in machines}
            raise Violation(f"stuck: {stuck}")

    def _history(self, state: State, seen: dict[State, State | None]) -> str:
        """How it came to that, for people."""
        found: list[str] = []
        at: State | None = state
        while at is not None and len(found) < 60:
            phases = ["dead" if n == GONE else self._shown(pickle.loads(self.states[n])) for n in at[0]]
            wires = {"->".join(ends): [self.messages[m][:3] for m in queue] for ends, queue in at[2]}
            found.append(f"{phases} epoch {at[1].epoch} {wires}")
            at = seen[at]
        return "\n".join(reversed(found))

    def _shown(self, device: Device) -> str:
        return f"{device.machine.phase}@{device.machine.counters.round}"


def _post(
    wires: tuple[Wire, ...], source: str, sent: tuple[tuple[str, int], ...], dead: tuple[str, ...]
) -> tuple[Wire, ...]:
    """``wires`` with more on them."""
    queues = dict(wires)
    for target, message in sent:
        if target not in dead:
            queues[source, target] = (*queues.get((source, target), ()), message)
    return tuple(sorted(queues.items()))


def explore(
    deaths: int,
    rounds: int,
    topology: Topology = REPLICATED_AND_NOT,
    *,
    go_on: bool = False,
    staggered: Staggered = FLUSHED,
    copying: bool = False,
    evaluations: Evaluations = NONE,
    twice: bool = False,
) -> tuple[int, int]:
    """Walk every state. Returns (states, ends). Raises Violation, also for a stuck state."""
    walk = Walk(Setting(topology, rounds, staggered, go_on, copying, evaluations, twice), deaths)
    return walk.run(), walk.ends
