"""A model of the commit protocol over the real ``Commit`` and ``decide``, walked through every interleaving.

Three devices: Either ``A`` and ``B`` hold layer 0 (one micro-batch each) and ``C`` layer 1 (both), or all
three are replicas, or ``B`` holds the layer of ``A``, too. Computing is one action of a device; everything
that the protocol says is an action or a message of its own. Messages between two ends arrive in order, those
of different ends in any order; a message of a dead device that is on its way may arrive or not. The daemon's
messages of different epochs may overtake each other, as they could if it was restarted in between. A state is
a tuple, so that states can be counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

import msgspec
from msgspec.structs import replace

from oobleckd.core.decide import LostLayers, Standing, Verdict, decide
from oobleckd.planner.plan import Detours
from oobleckd.protocol.messages import Decide, Progress
from oobleckd.protocol.parts import Counters, Vote
from oobleckd.worker.round_machine.commit import Commit
from tests.helpers.commit_states import (
    DEVICES,
    FLUSHED,
    REPLICATED_AND_NOT,
    Dev,
    Setting,
    Staggered,
    State,
    Topology,
)


class Violation(AssertionError):
    """The protocol broke a promise."""


def pack(message: msgspec.Struct) -> bytes:
    """A message as bytes that are equal when the messages are."""
    return msgspec.msgpack.encode(message)


_ENDS = itemgetter(0)
VOTE = Vote({}, {})
"""Votes are pure functions of the round: the model only needs to know that there is one."""


def thaw(name: str, dev: Dev) -> Commit:
    """The real device half of the protocol in this state."""
    return Commit(
        name,
        dev.epoch,
        dev.answered,
        dev.round,
        dev.live,
        VOTE if dev.voted else None,
        VOTE if dev.last else None,
        dict.fromkeys(dev.votes, VOTE),
        dict.fromkeys(dev.early, VOTE),
    )


def freeze(dev: Dev, commit: Commit) -> Dev:
    """The inverse of ``thaw``."""
    return replace(
        dev,
        epoch=commit.epoch,
        answered=commit.answered,
        round=commit.round,
        live=commit.live,
        voted=commit.own is not None,
        last=commit.last is not None,
        votes=frozenset(commit.votes),
        early=frozenset(commit.early),
    )


class World:
    """A mutable copy of a state, on which one action is carried out."""

    def __init__(self, state: State) -> None:
        self.devices = dict(state.devices)
        self.wires = dict(state.wires)
        self.setting = state.setting
        self.dead, self.epoch, self.over = state.dead, state.epoch, state.over
        self.detours, self.settled = state.detours, state.settled
        self.progress = dict(state.progress)

    def state(self) -> State:
        """The state again."""
        return State(
            self.setting,
            tuple(self.devices.items()),  # in the order of ``DEVICES``, as ever
            tuple(sorted(self.wires.items(), key=_ENDS)),
            self.dead,
            self.epoch,
            tuple(sorted(self.progress.items())),
            self.over,
            self.detours,
            self.settled,
        )

    def post(self, source: str, target: str, message: object) -> None:
        """Put a message on the wire."""
        if target not in self.dead:
            self.wires[source, target] = (*self.wires.get((source, target), ()), message)

    # ------------------------------------------------------------------ a device's own actions

    def holders(self, name: str, dev: Dev) -> list[str]:
        """Live holders of the layer that ``name`` holds."""
        held = self.setting.topology.held
        return [peer for peer in DEVICES if held[peer] == held[name] and peer in dev.live]

    def compute(self, name: str, dev: Dev) -> None:
        """Everything owed, with the weights that are there."""
        self.check_weights(name, dev)
        dev = self.devices[name] = replace(dev, done=dev.done | dev.owed)
        if self.setting.copying:
            self.copy(name, dev)

    def check_weights(self, name: str, dev: Dev) -> None:
        """A forward or backward pass of the present round."""
        if dev.weights != (dev.round, ""):
            raise Violation(f"{name} computes round {dev.round} with weights {dev.weights}")

    def hurry(self, name: str, dev: Dev) -> None:
        """Update as if all votes were in."""
        after = (dev.round + 1, "" if self.setting.staggered.through else "wrong")
        self.devices[name] = replace(dev, weights=after, saved=dev.weights)

    def take_back(self, dev: Dev) -> Dev:
        """The weights as they were."""
        return replace(dev, weights=dev.saved, saved=None) if dev.saved is not None else dev

    def contribute(self, name: str, dev: Dev) -> None:
        """Send what is complete to the other holders."""
        ledger = self.setting.topology.micro_batches if dev.donor else dev.done
        for peer in self.holders(name, dev):
            if peer != name:
                self.post(name, peer, ("G", dev.epoch, dev.round, ledger))
        self.devices[name] = replace(dev, sent=True, got=dev.got | {(name, ledger)})
        self.settle(name)

    def copy(self, name: str, dev: Dev) -> None:
        """Send what is in the sums to the next holder, who keeps it. A part of computing: what may come
        between is its arrival.
        """
        holders = self.holders(name, dev)
        keeper = holders[(holders.index(name) + 1) % len(holders)]
        if keeper != name:
            self.post(name, keeper, ("C", dev.round, dev.done))

    def keep(self, source: str, target: str, round_: int, ledger: frozenset[int]) -> None:
        """A copy: of this round or a later one, and of nobody who was already said to be dead."""
        dev = self.devices[target]
        if source not in dev.dead and round_ >= dev.round:
            self.devices[target] = replace(dev, copies=dev.copies | {(round_, source, ledger)})

    def inherit(self, dev: Dev, gone: frozenset[str]) -> Dev:
        """What is kept of those who are ``gone`` counts as the device's own; what they sent of later rounds
        does not.
        """
        kept = {ledger for round_, source, ledger in dev.copies if source in gone and round_ == dev.round}
        ledger = frozenset[int]().union(*kept)
        if ledger & dev.done:
            raise Violation(f"counted twice in round {dev.round}: {sorted(ledger & dev.done)}")
        left = frozenset(copy for copy in dev.copies if copy[1] not in gone)
        return replace(dev, done=dev.done | ledger, owed=dev.owed | ledger, copies=left)

    def settle(self, name: str) -> None:
        """Reduce when all contributions are in; the ledgers must be a partition."""
        dev = self.devices[name]
        if dev.reduced:
            return
        sources = [dev.donor] if dev.donor else self.holders(name, dev)
        got = dict(dev.got)
        if not all(source in got for source in sources):
            return
        counted = sorted(mb for source in sources for mb in got[source])
        if counted != sorted(self.setting.topology.micro_batches):
            raise Violation(f"{name} round {dev.round}: counted {counted}")
        self.devices[name] = replace(dev, reduced=True, got=frozenset())

    def vote(self, name: str, commit: Commit) -> None:
        """REDUCED: tell all."""
        commit.cast(VOTE)
        self.devices[name] = freeze(self.devices[name], commit)
        self.send_vote(name, commit)

    def send_vote(self, name: str, commit: Commit) -> None:
        """Own vote to every live peer."""
        for peer in sorted(commit.live - {name}):
            self.post(name, peer, ("V", commit.epoch, commit.round))

    def commit(self, name: str, commit: Commit) -> None:
        """Update and begin the next round."""
        dev = self.devices[name]
        if not dev.reduced:
            raise Violation(f"{name} commits round {dev.round} without being reduced")
        if dev.saved is None or not self.setting.staggered.through:
            dev = self.take_back(dev)
            dev = replace(dev, weights=(dev.weights[0] + 1, dev.weights[1]))
        dev = replace(dev, saved=None)
        commit.advance(VOTE)
        fresh = replace(
            freeze(dev, commit),
            owed=self.setting.topology.owed(name, dev.dead, dev.detours, commit.round),
            done=frozenset(), sent=False, got=frozenset(), reduced=False,
            holding=dev.hold_next, hold_next=False,
            copies=frozenset(copy for copy in dev.copies if copy[0] >= commit.round),
        )  # fmt: skip
        self.devices[name] = replace(fresh, donor="")
        self.catch_up(name)

    def catch_up(self, name: str) -> None:
        """Contributions that came too early may be due now."""
        dev = self.devices[name]
        due = {item for item in dev.ahead if item[:2] == (dev.epoch, dev.round)}
        keep = frozenset(i for i in dev.ahead - due if i[0] >= dev.epoch and i[1] >= dev.round)
        got = dev.got | {(item[2], item[3]) for item in due}
        self.devices[name] = replace(dev, got=got, ahead=keep)
        self.settle(name)

    # ------------------------------------------------------------------ messages

    def deliver(self, source: str, target: str) -> None:
        """The first message of this wire arrives."""
        message, *rest = self.wires.pop((source, target))
        if rest:
            self.wires[source, target] = tuple(rest)
        match message:
            case ("G", int(epoch), int(round_), ledger):
                self.hear_sums(source, target, epoch, round_, ledger)
            case ("C", int(round_), ledger):
                self.keep(source, target, round_, ledger)
            case ("V", int(epoch), int(round_)):
                commit = thaw(target, self.devices[target])
                commit.hear(source, epoch, round_, VOTE)
                self.devices[target] = freeze(self.devices[target], commit)
            case ("report", int(epoch), frozenset() as dead):
                self.report(target, epoch, dead)
            case ("P", bytes() as data):
                self.hear_progress(source, data)
            case ("D", bytes() as data):
                self.decide(target, msgspec.msgpack.decode(data, type=Decide))

    def hear_sums(self, source: str, target: str, epoch: int, round_: int, ledger: frozenset[int]) -> None:
        """A contribution: now, later, or fenced off."""
        dev = self.devices[target]
        if epoch < dev.epoch or round_ < dev.round:
            return
        if (epoch, round_) == (dev.epoch, dev.round) and not thaw(target, dev).frozen:
            self.devices[target] = replace(dev, got=dev.got | {(source, ledger)})
            self.settle(target)
        else:
            self.devices[target] = replace(dev, ahead=dev.ahead | {(epoch, round_, source, ledger)})

    def report(self, name: str, epoch: int, dead: frozenset[str]) -> None:
        """Freeze and answer."""
        commit = thaw(name, self.devices[name])
        if not commit.report(epoch):
            return
        dev = self.take_back(self.devices[name])
        gone = dev.dead | dead
        standing = self.setting.topology.standing(dev.detours, dev.round)
        frozen = {r.micro_batch for r in standing if r.touches(gone)}
        dev = replace(freeze(dev, commit), dead=gone, owed=dev.owed - (frozen - dev.done))
        dev = self.inherit(dev, gone)
        self.devices[name] = dev
        answer = Progress(
            name,
            epoch,
            Counters(dev.round, dev.round, dev.round),
            {self.setting.topology.held[name]: tuple(sorted(dev.done))},
            (self.setting.topology.held[name],) if dev.reduced else (),
            commit.heard(),
            commit.last,
            dev.holding,
        )
        self.post(name, "daemon", ("P", pack(answer)))

    def hear_progress(self, source: str, data: bytes) -> None:
        """The daemon's side: decide when all survivors have answered."""
        if msgspec.msgpack.decode(data, type=Progress).epoch != self.epoch:
            return
        self.progress[source] = data
        live = [d for d in DEVICES if d not in self.dead]
        if set(self.progress) != set(live):
            return
        known = msgspec.msgpack.decode(self.detours, type=Detours) if self.detours else None
        verdict = self.verdict(known)
        self.progress = {}
        if isinstance(verdict, LostLayers):
            self.over = True
            return
        if verdict.detours is not None:
            self.detours, self.settled = pack(verdict.detours), self.dead
            known = verdict.detours
        for name in live:
            self.post(f"daemon {self.epoch}", name, ("D", pack(verdict.told(name, self.epoch, known))))

    def verdict(self, known: Detours | None) -> Verdict:
        """What the daemon makes of the answers."""
        answers = tuple(sorted(self.progress.items()))
        key = (self.epoch, answers, self.dead, self.detours, self.settled)
        if key not in self.setting.verdicts:
            top = self.setting.topology
            count = len(top.micro_batches)
            told = {name: msgspec.msgpack.decode(data, type=Progress) for name, data in answers}
            before = Standing(known, tuple(sorted(self.settled)), self.setting.go_on)
            self.setting.verdicts[key] = decide(
                self.epoch, told, top.layout, self.dead, top.uses, count, before
            )
        return self.setting.verdicts[key]

    def decide(self, name: str, message: Decide) -> None:
        """Commit if told to, take the new attempts, go on under the new epoch."""
        dev = self.devices[name]
        commit = thaw(name, dev)
        if not commit.decide(message.epoch, frozenset(DEVICES) - dev.dead):
            return
        detours = pack(message.detours) if message.detours is not None else b""
        self.devices[name] = replace(freeze(dev, commit), detours=detours)
        if commit.round < message.round:
            if message.commit is None:
                raise Violation(f"{name} is behind in round {commit.round} and nothing tells it to commit")
            self.commit(name, commit)
        dev = self.devices[name]
        extra = {
            r.micro_batch
            for r in message.routes
            if any(s.device == name for s in r.segments) and r.wants(self.setting.topology.held[name])
        }
        if any(route.touches([name]) for route in message.routes):
            self.check_weights(name, dev)
        self.devices[name] = replace(
            dev,
            owed=dev.owed | extra,
            sent=False,
            got=frozenset(),
            donor=message.donors.get(self.setting.topology.held[name], ""),
            holding=message.hold_now,
            hold_next=message.hold,
        )
        self.catch_up(name)
        commit = thaw(name, self.devices[name])
        if commit.own is not None:
            self.send_vote(name, commit)

    def kill(self, name: str) -> None:
        """``name`` dies; the daemon notices and reports."""
        self.dead |= {name}
        self.wires = {ends: queue for ends, queue in self.wires.items() if ends[1] != name}
        self.wires.pop((name, "daemon"), None)
        self.epoch += 1
        self.progress = {}
        for peer in DEVICES:
            if peer not in self.dead:
                self.post(f"daemon {self.epoch}", peer, ("report", self.epoch, self.dead))


def start(setting: Setting) -> State:
    """Nothing done yet."""
    return State(setting, tuple((d, Dev(owed=setting.topology.owed(d))) for d in DEVICES))


def successors(state: State, rounds: int) -> Iterator[State]:
    """Every state that one action leads to, but for those of a death."""
    if state.over:
        return
    for name, dev in state.devices:
        if name not in state.dead and dev.round < rounds and not dev.holding:
            yield from _own(state, name, dev)
    for (source, target), _ in state.wires:
        world = World(state)
        world.deliver(source, target)
        yield world.state()


def bereft(state: State, deaths: int) -> Iterator[State]:
    """Every state that one more death leads to, of ``deaths`` at most."""
    if state.over or len(state.dead) >= deaths:
        return
    for name in DEVICES:
        if name not in state.dead:
            world = World(state)
            world.kill(name)
            yield world.state()


def _own(state: State, name: str, dev: Dev) -> Iterator[State]:
    if not dev.owed <= dev.done:
        world = World(state)
        world.compute(name, dev)
        yield world.state()
    commit = thaw(name, dev)
    if commit.frozen:
        return
    may_send = dev.donor == name if dev.donor else dev.owed <= dev.done
    if not dev.sent and may_send:
        world = World(state)
        world.contribute(name, dev)
        yield world.state()
    if dev.reduced and not dev.voted:
        world = World(state)
        world.vote(name, thaw(name, dev))
        yield world.state()
    if state.setting.staggered.on and dev.voted and dev.saved is None and not dev.hold_next:
        world = World(state)
        world.hurry(name, dev)
        yield world.state()
    if commit.committed() is not None:
        world = World(state)
        world.commit(name, commit)
        yield world.state()


def explore(
    deaths: int,
    rounds: int,
    topology: Topology = REPLICATED_AND_NOT,
    *,
    go_on: bool = False,
    staggered: Staggered = FLUSHED,
    copying: bool = False,
) -> tuple[int, int]:
    """Walk every state. Returns (states, ends). Raises Violation, also for a stuck state."""
    first = start(Setting(topology, staggered, go_on, copying))
    seen = {first}
    frontier = [first]
    ends = 0
    while frontier:
        state = frontier.pop()
        moves = list(successors(state, rounds))
        if not moves:  # a state that only a death can leave is an end
            ends += 1
            _check_end(state, rounds)
        for following in [*moves, *bereft(state, deaths)]:
            known = len(seen)
            seen.add(following)
            if len(seen) > known:
                frontier.append(following)
    return len(seen), ends


def _check_end(state: State, rounds: int) -> None:
    if state.over:
        return
    live = [dev for name, dev in state.devices if name not in state.dead]
    if len({dev.round for dev in live}) > 1 or any(dev.round < rounds and not dev.holding for dev in live):
        raise Violation(f"stuck: {live}")
