"""Who is there: nodes, their incarnations, leases, and the evidence that an incarnation is over.

Owns the judgement whether a node's present incarnation goes on, and within it the incarnation of each device.
Does not own what a loss means for a job (``recovery``), nor how long a lease is (``lease``). A node's
incarnation is over at: the agent's word that a device exited or hangs and no spare takes its place, a closed
link that a peer's broken link confirms, a missed lease, a goodbye, a newer incarnation. A closed link alone
is no death, and silence is none while it may be ours (docs/mechanisms/detection.md). A device's incarnation
ends with its node's, and at the agent's word that it exited, its place being taken by the node's spare: such
a node is *mending* until the spare is up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from oobleckd.core.lease import SHORTEST, Lease
from oobleckd.planner.plan import node_of
from oobleckd.protocol.agentmessages import DeviceLost, Goodbye, Hello
from oobleckd.protocol.messages import LinkDown
from oobleckd.protocol.parts import DeviceInfo, NodeCause, Spare
from oobleckd.protocol.traits import CANARY, no_compiler
from oobleckd.words import seconds

Change = Literal["new", "back", "same"]
_AGAIN_S = 0.05  # until a silence that may be ours is judged again
# What a sum of times may be off by. A deadline that is asked for and then found not to be there yet would be
# asked for again,
# and while we are late for it the waking clock stands still: for ever.
ROUNDING_S = 1e-5


@dataclass(frozen=True, slots=True)
class Fall:
    """The end of a device's incarnation in a node that lives on. ``at``: the first evidence."""

    cause: str
    at: float


@dataclass(slots=True)
class Node:
    """A node. ``devices`` with their last known incarnations, of which those in ``fallen`` (by name) are
    over.

    ``accused``: (accuser, accused device) -> when their link broke (waking clock); ``suspect_at``: the first
    evidence. ``cause``: what it is over of, for people, and ``code``, for programs. ``exited``: it is over at
    the agent's word that a device process ended. ``notice``: why it is about to be ended by others, at
    ``ends_at``; ``dismissed``: it was told that it may leave. ``forgotten``: nobody is to see it, until it is
    back. ``releasing``: device -> its incarnation and the last order to drop what it holds, which it has not
    answered. ``prepares``: its agent can prepare data.
    """

    name: str
    incarnation: str
    lease: Lease
    host: str = ""
    zone: str = ""
    ready: bool = False
    devices: tuple[DeviceInfo, ...] = ()
    spare: Spare | None = None
    fallen: dict[str, Fall] = field(default_factory=dict)
    connected: bool = True
    alive: bool = True
    left: bool = False
    exited: bool = False
    heard_at: float = 0.0
    suspect_at: float | None = None
    cause: str = ""
    code: NodeCause = ""
    accused: dict[tuple[str, str], float] = field(default_factory=dict)
    notice: str = ""
    ends_at: float = 0.0
    dismissed: bool = False
    releasing: dict[str, tuple[str, str]] = field(default_factory=dict)
    forgotten: bool = False
    prepares: bool = False

    @property
    def present(self) -> bool:
        """Whether a plan may count on it: its devices are up, or about to be."""
        return self.alive and self.connected and (self.ready or self.mending)

    @property
    def mending(self) -> bool:
        """Whether its spare is just taking the place of a device."""
        return bool(self.fallen)

    @property
    def no_compiler(self) -> str:
        """Why one of its devices can compile nothing; "" where all can."""
        return next((why for device in self.devices if (why := no_compiler(device.all_traits))), "")

    def accusers(self) -> str:
        """Who lost a link to it, for a sentence."""
        return ", ".join(sorted({accuser for accuser, _ in self.accused}))


@dataclass(slots=True)
class Membership:
    """All nodes ever seen in this incarnation of the daemon. ``obituaries``: incarnations that ended, not yet
    announced.

    ``lease_s``: the longest lease. ``heartbeat_s``: the least distance of heartbeats. ``asleep_s``: how long
    this daemon did not run although it was due; leases do not run meanwhile. ``touched``: nodes on which a
    plan may count more, or less, since somebody cleared it, and ``turns`` how often there was one: while it
    stands no incarnation began or ended. ``look_at``: no lease ends before (waking clock). ``at_odds``:
    nobody else is accused. ``leaving``: nobody else has a notice. ``owing``: nobody else has yet to drop what
    it was told to drop. ``traits``: those that devices ever said.
    """

    lease_s: float
    link_grace_s: float
    heartbeat_s: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    obituaries: list[str] = field(default_factory=list)
    asleep_s: float = 0.0
    touched: set[str] = field(default_factory=set)
    turns: int = 0
    look_at: float = float("inf")
    at_odds: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    owing: set[str] = field(default_factory=set)
    traits: dict[tuple[tuple[str, str], ...], dict[str, str]] = field(default_factory=dict)

    def attend(self, now: float, due: float | None) -> float:
        """An event is at hand that should have come at ``due`` at the latest: the seconds that we slept
        through.
        """
        slept_s = 0.0 if due is None else max(0.0, now - due)
        self.asleep_s += slept_s
        return slept_s

    def hello(self, message: Hello, now: float) -> Change:
        """An agent introduced itself: a new incarnation, one that is back on a new connection, or
        news of it.
        """
        node = self.nodes.get(message.node)
        if node is None or not node.alive or node.incarnation != message.incarnation:
            change: Change = "new"
            lease = Lease(self.lease_s, self.waking(now), self.heartbeat_s)
            node = self.nodes[message.node] = Node(message.node, message.incarnation, lease)
            self.owing.discard(node.name)
        else:
            change = "same" if node.connected else "back"
            node.lease.reconnected(self.waking(now))
        node.host, node.zone, node.ready, node.spare = (
            message.host,
            message.zone,
            message.ready,
            message.spare,
        )
        node.prepares = message.prepares
        self._forgive_ended(message, change)
        self._take_notice(node, message, now)
        self._take_devices(node, message, now)
        self._touch(node)
        node.connected, node.heard_at = True, now
        node.suspect_at = None
        self._watch(node)
        return change

    def goes_on(self, name: str, incarnation: str, now: float) -> bool:
        """Take in a heartbeat of an incarnation that is known and connected; False, and nothing is taken in,
        if it is of any other.
        """
        node = self.nodes.get(name)
        if node is None or not (node.alive and node.connected) or node.incarnation != incarnation:
            return False
        self._heartbeats(node, now)
        return True

    def heartbeat(self, name: str, incarnation: str, now: float) -> bool:
        """A sign of life; True if it comes from an incarnation that was declared over (it is a fresh one
        now).
        """
        node = self.nodes.get(name)
        if node is None or node.incarnation != incarnation:
            return False
        revived = not node.alive and not node.left
        if revived:
            node.alive, node.cause, node.code, node.suspect_at, node.accused = True, "", "", None, {}
            node.exited = node.forgotten = False
            node.lease = Lease(self.lease_s, self.waking(now), self.heartbeat_s)
            self._touch(node)
        node.connected = node.connected or revived
        self._heartbeats(node, now)
        return revived

    def _heartbeats(self, node: Node, now: float) -> None:
        node.heard_at = now
        awake = now - self.asleep_s
        node.lease.heartbeats(awake)
        # A heartbeat looks at leases and at nothing else: 1,000 nodes send 4,000 a second, and looking at
        # every node each time took the loop a second behind. (D-daemon-002)
        if self.look_at > awake + min(SHORTEST * self.heartbeat_s, self.lease_s):
            self._watch(node)  # no lease that begins now ends before

    def heard(self, name: str, now: float) -> None:
        """Any other message of a node."""
        node = self.nodes.get(name)
        if node is not None:
            node.heard_at, node.lease.heard = now, self.waking(now)

    def witness(self, names: Iterable[str], now: float) -> None:
        """Others prove that these nodes compute: a round was committed, which takes the votes of all."""
        for name in names:
            node = self.nodes.get(name)
            if node is not None:
                node.lease.witnessed = self.waking(now)

    def link_lost(self, name: str, now: float) -> None:
        """The agent's connection closed."""
        node = self.nodes.get(name)
        if node is None or not node.alive:
            return
        node.connected = False
        self._touch(node)
        node.suspect_at = now if node.suspect_at is None else node.suspect_at
        if node.accused:
            self._over(node, f"its link closed and {node.accusers()} lost it too", now, "link-closed")

    def link_down(self, message: LinkDown, now: float) -> None:
        """A device lost its link to a peer. Callers pass only links between live devices of one layout."""
        node = self.nodes.get(node_of(message.peer))
        if node is None or not node.alive:
            return
        node.accused.setdefault((message.device, message.peer), self.waking(now))
        self.at_odds.add(node.name)
        node.suspect_at = now if node.suspect_at is None else node.suspect_at
        if not node.connected:
            self._over(node, f"its link closed and {message.device} lost it too", now, "link-closed")

    def linked_anew(self, device: str) -> None:
        """A device is told what gives it new links: that an old one of its broke accuses nobody any more."""
        # Deploy and Release give a device new links, which its agent's outbox knows too. What it had lost
        # before evicted a live node as soon as both ends were in a layout again. (D-detection-006)
        for name in sorted(self.at_odds):  # nobody else is accused
            node = self.nodes[name]
            node.accused = {ends: at for ends, at in node.accused.items() if ends[0] != device}

    def device_lost(self, name: str, message: DeviceLost, now: float) -> bool:
        """The agent saw a device of its own exit; whether only that device's incarnation is over by it."""
        if not self.living_node(name, message.incarnation):
            return False
        node = self.nodes[name]
        node.ready = False
        self._touch(node)
        if not message.spare:
            self._over(node, f"{message.device}: {message.evidence}", now, "device-lost")
            node.exited = True
            return False
        at = now if node.suspect_at is None else node.suspect_at
        node.fallen[message.device] = Fall(message.evidence, at)
        node.suspect_at = None
        self._forgive([message.device])
        return True

    def goodbye(self, name: str, message: Goodbye, now: float) -> None:
        """The agent leaves in order."""
        node = self.nodes.get(name)
        if node is not None and node.incarnation == message.incarnation:
            late = "; its time was up" if message.overdue else ""
            self._over(node, f"left: {message.reason}{late}", now, "overdue" if message.overdue else "left")
            node.left, node.connected = True, False
            self._touch(node)

    def evict(self, name: str, cause: str, now: float, code: NodeCause) -> None:
        """End a node's incarnation by decision; its next sign of life makes it a fresh node."""
        self._over(self.nodes[name], cause, now, code)

    def expire(self, now: float, spared: Callable[[str], bool] = lambda _: False) -> None:
        """Incarnations whose lease has run out are over, but not while it may be us who hear nobody, nor
        those of ``spared`` nodes, which are waited for.
        """
        awake = self.waking(now) + ROUNDING_S
        if awake < self.look_at:
            return
        self.look_at = float("inf")
        for node in self.nodes.values():
            if not node.alive:
                continue
            if awake < self._ends(node):
                self._watch(node)
            # Silence of all is most likely ours, or the network's: a lease runs out only where another node
            # was heard in time, until the longest lease (docs/mechanisms/detection.md).
            elif (awake < node.lease.heard + self.lease_s and not self._hear_others(node, awake)) or spared(
                node.name
            ):
                self.look_at = min(self.look_at, awake + _AGAIN_S)
            else:
                silence_s, length_s = awake - node.lease.heard, self._ends(node) - node.lease.heard
                node.suspect_at = node.heard_at if node.suspect_at is None else node.suspect_at
                why = f"no sign of life for {seconds(silence_s)} (its lease: {seconds(length_s)})"
                self._over(node, why, now, "silent")

    def hears_others(self, node: Node, now: float) -> bool:
        """Whether some other node is in time."""
        return self._hear_others(node, self.waking(now))

    def silent_s(self, node: Node, now: float) -> float:
        """For how long a living node is silent, if that is longer than it should be; else 0."""
        awake = self.waking(now)
        return awake - node.lease.heard if node.alive and node.lease.late(awake) else 0.0

    def quarrel(self, live: Collection[str], now: float) -> str:
        """The node to evict because a link between two live nodes stays down ("" for none).

        Fixed rule: most accusers first, then the name that sorts last.
        """
        due, awake = [], self.waking(now) + ROUNDING_S
        for node in self._accused():
            if node.name in live:
                broken = [(by, at) for (by, _), at in node.accused.items() if node_of(by) in live]
                if broken and awake >= min(at for _, at in broken) + self.link_grace_s:
                    due.append((len({by for by, _ in broken}), node.name))
        return max(due)[1] if due else ""

    def deadline(self, now: float) -> float | None:
        """When ``expire`` or ``quarrel`` may have something new to say after ``now``."""
        due = [self.look_at + self.asleep_s] if self.look_at != float("inf") else []
        if not self.at_odds:  # asked after every event
            return min(due, default=None)
        awake = self.waking(now) + ROUNDING_S
        due += [
            at + self.link_grace_s + self.asleep_s
            for node in self._accused()
            for at in node.accused.values()
            if at + self.link_grace_s > awake
        ]
        return min(due, default=None)

    def living(self, device: str, incarnation: str) -> bool:
        """Whether the incarnation ``incarnation`` of a device goes on."""
        node = self.nodes.get(node_of(device))
        if node is None or not node.alive or device in node.fallen:
            return False
        return any(info.device == device and info.incarnation == incarnation for info in node.devices)

    def living_node(self, name: str, incarnation: str) -> bool:
        """Whether this incarnation of a node goes on."""
        node = self.nodes.get(name)
        return node is not None and node.alive and node.incarnation == incarnation

    def ended(self, device: str) -> bool:
        """Whether its agent has said that the process ended, or all of the node: it lives never again,
        whoever asks.
        """
        node = self.nodes.get(node_of(device))
        return node is not None and (device in node.fallen or node.exited)

    def device(self, name: str) -> DeviceInfo | None:
        """What is known of a device, whether it lives or not."""
        node = self.nodes.get(node_of(name))
        return next((d for d in node.devices if d.device == name), None) if node else None

    def hear_canary(self, device: str, canary: str) -> None:
        """A device says what it came to for its job ("": nothing), before its agent's next Hello does."""
        node, info = self.nodes.get(node_of(device)), self.device(device)
        if node is not None and info is not None and info.traits.get(CANARY, "") != canary:
            known = {name: value for name, value in info.all_traits.items() if name != CANARY}
            heard = msgspec.structs.replace(info, traits=known | ({CANARY: canary} if canary else {}))
            node.devices = tuple(self._sharing(heard if each is info else each) for each in node.devices)

    def releases(self, device: str, order: str) -> None:
        """A device is told to drop what it holds."""
        node, info = self.nodes.get(node_of(device)), self.device(device)
        if node is not None and info is not None and node.alive:
            # Until a device says that it has dropped a job, no plan copies anything to its node: a slow one
            # got to an old Release when the next plan's copies had come, and dropped them. (D-recovery-023)
            node.releasing[device] = (info.incarnation, order)
            self.owing.add(node.name)
            self._touch(node)

    def emptied(self, device: str, order: str = "") -> None:
        """It has, as it was told by ``order`` ("": whatever it was told before)."""
        node = self.nodes.get(node_of(device))
        if node is not None and device in node.releasing and order in {"", node.releasing[device][1]}:
            self._let_off(node, {name: told for name, told in node.releasing.items() if name != device})
            self._touch(node)

    def owes(self, device: str) -> bool:
        """Whether it has not said yet that it has."""
        node = self.nodes.get(node_of(device))
        return node is not None and device in node.releasing

    def _let_off(self, node: Node, kept: dict[str, tuple[str, str]]) -> None:
        """Let ``node`` owe nothing but ``kept``."""
        node.releasing = kept
        if not kept:
            self.owing.discard(node.name)

    def _accused(self) -> list[Node]:
        """Living nodes with a broken link: every event asks, so nobody looks at all of thousands."""
        accused = [node for name in sorted(self.at_odds) if (node := self.nodes[name]).alive and node.accused]
        self.at_odds = {node.name for node in accused}
        return accused

    def waking(self, now: float) -> float:
        """The waking clock at ``now``: it stands still while this daemon does."""
        # A daemon that stood still before its agents were back gave up all of them at its own tick.
        # (D-detection-005)
        return now - self.asleep_s

    def _ends(self, node: Node) -> float:
        # Whose link closed is reconnecting, which takes as long as it takes: only the longest lease holds.
        return node.lease.ends() if node.connected else node.lease.heard + self.lease_s

    def _forgive_ended(self, message: Hello, change: Change) -> None:
        """Incarnations that this Hello shows to be over: of its node, or of devices of it."""
        # Else a node whose spare took a place while its agent was cut off was evicted two seconds later,
        # and with it the last copy of a layer. (D-detection-003)
        incarnations = {info.device: info.incarnation for info in message.devices}
        known = self.nodes[message.node].devices
        over = [
            info.device
            for info in known
            if incarnations.get(info.device, info.incarnation) != info.incarnation
        ]
        if change == "new":
            ends = {end for name in sorted(self.at_odds) for ends in self.nodes[name].accused for end in ends}
            over = [end for end in ends if node_of(end) == message.node]
        self._forgive(over)

    def _forgive(self, devices: Collection[str]) -> None:
        """The incarnations of ``devices`` are over: broken links to or from a dead process accuse nobody who
        lives.
        """
        if devices:
            for name in sorted(self.at_odds):  # nobody else is accused
                node = self.nodes[name]
                node.accused = {e: at for e, at in node.accused.items() if not set(devices) & set(e)}

    def _watch(self, node: Node) -> None:
        ends = self._ends(node)
        self.look_at = min(self.look_at, ends)

    def _hear_others(self, node: Node, awake: float) -> bool:
        """Whether some other node is in time: then our ears and the network behind them are."""
        return any(
            other.alive and other.connected and not other.lease.late(awake)
            for other in self.nodes.values()
            if other is not node
        )

    def _take_notice(self, node: Node, message: Hello, now: float) -> None:
        """The word that it is about to end; a dismissal may have been lost with the connection before this
        one.
        """
        # The notice is a field of Hello and in no journal: it ends with the incarnation that has it, and a
        # restarted daemon hears it again. (D-service-005)
        node.notice, node.dismissed = "", False
        self.leaving.discard(node.name)
        if message.notice is not None:
            node.notice, node.ends_at = message.notice.reason, now + message.notice.left_s
            self.leaving.add(node.name)

    def _take_devices(self, node: Node, message: Hello, now: float) -> None:
        """The devices as the agent names them; one that was up and is not listed has fallen."""
        listed = {info.device for info in message.devices}
        absent = [] if message.ready else [info for info in node.devices if info.device not in listed]
        node.devices = (*map(self._sharing, message.devices), *absent)
        unseen = Fall("its process ended", now)
        node.fallen = {info.device: node.fallen.get(info.device, unseen) for info in absent}
        incarnations = {(info.device, info.incarnation) for info in message.devices}
        self._let_off(
            node, {name: told for name, told in node.releasing.items() if (name, told[0]) in incarnations}
        )

    def _sharing(self, info: DeviceInfo) -> DeviceInfo:
        """``info`` with the traits of those before that have the same: thousands of devices say them, and one
        dict is kept.
        """
        known = self.traits.setdefault(tuple(info.traits.items()), info.traits)
        return info if known is info.traits else msgspec.structs.replace(info, traits=known)

    def _touch(self, node: Node) -> None:
        self.touched.add(node.name)
        self.turns += 1

    def _over(self, node: Node, cause: str, now: float, code: NodeCause) -> None:
        if node.alive:
            self.obituaries.append(node.name)
        node.alive = False
        self._touch(node)
        node.cause, node.code = cause, code
        node.suspect_at = now if node.suspect_at is None else node.suspect_at
        node.accused, node.fallen = {}, {}
        self._let_off(node, {})
