"""What can go wrong in a simulated world, one method each: whom it strikes is chosen by a dice when it
strikes.

Owns how a thing is done to a world, and for how long; what happens when is ``weather``'s. The docstrings of
``simnet`` and ``simtransport`` say what a link can do and what it cannot.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from oobleckd.planner.plan import node_of
from oobleckd.protocol.requests import AnyRequest, Control, Drain
from tests.helpers.simagent import SimNode, Sleeper
from tests.helpers.simnet import DAEMON
from tests.helpers.simtransport import Link
from tests.helpers.world import World

_JOB = "job-1"
_OPERATOR_S = 2.0  # how often somebody looks after the nodes, once the weather is clear
_DAY_S = 86_400.0
_BREAKS = 0.3  # of answers that are late: so many are, since their connection broke


class Hazards:
    """Of ``world``. ``copies``: at least so many nodes are left alive by kills. ``struck``: how often each
    thing happened.
    """

    def __init__(self, world: World, copies: int) -> None:
        self.world, self.copies = world, copies
        self.struck: Counter[str] = Counter()
        self.clear_at = 0.0
        self.dice = random.Random()

    def strike(self, kind: str, dice: random.Random) -> None:
        """Have ``kind`` happen now, if there is anything that it could happen to."""
        self.dice = dice
        if KINDS[kind](self):
            self.struck[kind] += 1

    @property
    def clear(self) -> bool:
        """Whether all that lasts a while is over."""
        return self.world.now >= self.clear_at

    # ------------------------------------------------------------------ deaths and births

    def kill(self) -> bool:
        """SIGKILL of a node, or of two at once."""
        return self._end(self.world.kill, self.dice.choice([1, 1, 1, 2]))

    def vanish(self) -> bool:
        """A host is gone: nobody's link closes."""
        return self._end(lambda name: self.world.kill(name, silent=True))

    def leave(self) -> bool:
        """SIGTERM of an agent."""
        return self._end(self.world.leave)

    def notice(self) -> bool:
        """A node has notice of its end, which comes in time for a new plan or too early."""
        left_s = self._last(0.01, self.dice.choice([0.1, 1.0, 4.0]))
        return self._end(lambda name: self.world.nodes[name].noticed("preempted", left_s))

    def device(self) -> bool:
        """A device process dies, and the node has no spare."""
        restart_s, index = self.dice.uniform(0.05, 1.0), self.dice.randrange(self.world.num_devices)
        return self._end(lambda name: self.world.kill_device(name, restart_s, index=index))

    def spare(self) -> bool:
        """A device process dies, and the node's spare takes its place."""
        up_s, index = self.dice.uniform(0.005, 0.5), self.dice.randrange(self.world.num_devices)
        return self._end(lambda name: self.world.spare_takes_place(name, index, up_s))

    def join(self) -> bool:
        """A node comes back, or a new one comes."""
        dead = [name for name, node in sorted(self.world.nodes.items()) if not node.alive]
        self.world.add(self.dice.choice(dead) if dead else f"n{80 + len(self.world.nodes)}")
        return True

    def _end(self, act: Callable[[str], object], count: int = 1) -> bool:
        live = self.world.live()
        count = min(count, len(live) - self.copies)
        if count <= 0:
            return False
        for name in self.dice.sample(live, count):
            act(name)
        return True

    # ------------------------------------------------------------------ the network

    def agent_link(self) -> bool:
        """An agent's connection breaks; often one end notices late."""
        node = self._node(lambda node: node.connected)
        if node is None:
            return False
        self.world.network.break_link(node.name, *self._noticed_s())
        return True

    def device_link(self) -> bool:
        """A link between two devices breaks."""
        links = [
            link
            for device in self.world.devices()
            for _, link in sorted(device.transport.links.items())
            if link.is_open and not link.closed and _apart(link)
        ]
        if not links:
            return False
        link = self.dice.choice(links)
        for end in (link.source, link.target):
            self.world.checks.excuse(end.sim.node.name, 5.0)
        self.world.network.reset_devices(link, *self._noticed_s())
        return True

    def cut_daemon(self) -> bool:
        """Nothing gets from a node to the daemon, or back, or either."""
        node = self._node()
        if node is None:
            return False
        self._cut([node.name], [DAEMON])
        return True

    def cut_nodes(self) -> bool:
        """The same between two nodes."""
        names = self._names()
        if len(names) < 2:
            return False
        one, other = self.dice.sample(names, 2)
        self._cut([one], [other])
        return True

    def partition(self) -> bool:
        """Some nodes and the others cannot reach each other; the daemon is on one side."""
        names = self._names()
        if len(names) < 2:
            return False
        side = self.dice.sample(names, self.dice.randrange(1, len(names)))
        self._cut(side, [DAEMON, *(name for name in names if name not in side)])
        return True

    def lag(self) -> bool:
        """All that a node says, or all that it is told, takes up to seconds longer."""
        node = self._node()
        if node is None:
            return False
        seconds, extra_s = self._last(0.3, 3.0), self.dice.choice([0.02, 0.2, 1.0, 3.0])
        others = [DAEMON, *(name for name in sorted(self.world.nodes) if name != node.name)]
        said, told = self.dice.choice([(True, False), (False, True), (True, True)])
        for other in others:
            if said:
                self.world.network.lag(node.name, other, extra_s, seconds)
            if told:
                self.world.network.lag(other, node.name, extra_s, seconds)
        return True

    def _cut(self, some: Sequence[str], others: Sequence[str]) -> None:
        seconds = self.dice.choice([self.dice.uniform(0.02, 0.4), self.dice.uniform(0.4, 4.0)] * 4 + [9.5])
        self._lasts(seconds)
        there, back = self.dice.choice([(True, False), (False, True), (True, True), (True, True)])
        for one in some:
            for other in others:
                if there:
                    self.world.network.cut(one, other, seconds)
                if back:
                    self.world.network.cut(other, one, seconds)

    def _noticed_s(self) -> tuple[float, float]:
        """After how long the two ends of a broken link find out."""
        late_s = self.dice.uniform(0.1, 4.0)
        quick = (self.dice.uniform(0.0, 0.05), self.dice.uniform(0.0, 0.05))
        return self.dice.choice([quick, quick, (quick[0], late_s), (late_s, quick[1])])

    # ------------------------------------------------------------------ time

    def slow(self) -> bool:
        """A node's devices take many times as long for everything."""
        node = self._node()
        if node is None:
            return False
        node.slow = self.dice.choice([2.0, 5.0, 20.0])
        self.world.after(self._last(0.2, 3.0), setattr, node, "slow", 1.0)
        return True

    def pause_agent(self) -> bool:
        """An agent is stopped, or gets no processor; its devices train on."""
        node = self._node(lambda node: not node.agent.asleep)
        if node is None:
            return False
        self._pause(node, [node.agent])
        return True

    def pause_node(self) -> bool:
        """SIGSTOP of an agent and its devices."""
        node = self._node(lambda node: not (node.agent.asleep or node.host.asleep))
        if node is None:
            return False
        self._pause(node, [node.agent, node.host])
        return True

    def _pause(self, node: SimNode, processes: Sequence) -> None:
        seconds = self._last(0.05, self.dice.choice([0.5, 3.0]))
        self.world.checks.excuse(node.name, seconds)
        for process in processes:
            process.stop()
            self.world.after(seconds, process.go_on)

    def stop_devices(self) -> bool:
        """SIGSTOP of a node's devices alone; half of the time SIGCONT does not take before whoever did it
        lets go.
        """
        node = self._node(lambda node: node.ready and not (node.agent.asleep or node.host.asleep))
        if node is None:
            return False
        seconds = self._last(0.5, self.dice.choice([2.0, 9.0]))
        self.world.checks.excuse(node.name, seconds)
        self.world.held = self.dice.random() < 0.5
        self.world.stop_device(node.name)
        self.world.after(seconds, self._let_go, node.host)
        return True

    def _let_go(self, host: Sleeper) -> None:
        self.world.held = False
        host.go_on()

    # ------------------------------------------------------------------ the disk of the checkpoints

    def disk_full(self) -> bool:
        """It takes nothing for a while."""
        if self.world.disk_full:
            return False
        self.world.disk_full = True
        self.world.after(
            self._last(0.1, self.dice.choice([1.0, 6.0])), setattr, self.world, "disk_full", False
        )
        return True

    # ------------------------------------------------------------------ the daemon

    def restart(self) -> bool:
        """kill -9 of the daemon, half of the time while its disk syncs."""
        return self._restart(None)

    def jump(self) -> bool:
        """The same, and its next incarnation has another clock."""
        return self._restart(self.dice.choice([-1, 1]) * self.dice.choice([2.0, 3600.0, 400 * _DAY_S]))

    def stall(self) -> bool:
        """The daemon stands still; it hears all of it at once, afterwards."""
        daemon = self.world.daemon
        if not daemon.up:
            return False
        daemon.process.stop()
        self.world.after(self._last(0.02, self.dice.choice([0.3, 3.0, 3.0])), daemon.process.go_on)
        return True

    def _restart(self, skew_s: float | None) -> bool:
        if not self.world.daemon.up:
            return False
        down_s = self.dice.choice([self.dice.uniform(0.0, 0.1), self.dice.uniform(0.1, 2.0)])
        self._lasts(down_s + 1.0)
        if self.dice.random() < 0.5:
            disk = self.world.daemon.disk
            self._when(lambda: disk.syncing is not None, self.world.daemon.restart, down_s, skew_s)
        else:
            self.world.daemon.restart(down_s, skew_s)
        return True

    def ahead(self) -> bool:
        """A device dies, and the daemon as soon as it has told of that, which its journal may not know; and
        one more.
        """
        live, told = self.world.live(), self.world.daemon.disk.told_ahead
        if not self.world.daemon.up or len(live) - self.copies < 2:
            return False
        one, other = self.dice.sample(live, 2)
        before, down_s = len(told), self.dice.uniform(0.0, 0.3)
        self._lasts(down_s + 1.0)
        self.world.spare_takes_place(one)
        self._when(lambda: len(told) > before, self._die_with, other, down_s)
        return True

    def again(self) -> bool:
        """A device dies, and another while answers to the report of that are on their way, which take longer
        or are said again on a new connection. Those whose micro-batches the first had no part in go on until
        they hear of the second.
        """
        live, pairs = self.world.live(), self._pairs()
        if not pairs:
            return False
        first, second = self.dice.choice(pairs)
        late = [name for name in live if name not in {node_of(first), node_of(second)}]
        gap_s, more_s = self.dice.choice([0.02, 0.05, 0.1]), self.dice.choice([0.02, 0.1])
        breaks = self.dice.random() < _BREAKS
        self._lasts(0.4)
        self._take_place(first)
        self._when(self._asked, self._again, second, late, gap_s, more_s, breaks)
        return True

    def _pairs(self) -> list[tuple[str, str]]:
        """Two devices of a job at work whose loss leaves a copy of every layer, and both of which no
        micro-batch passes: all there are.
        """
        run = self.world.machine.core.run if self.world.daemon.up and self.world.machine is not None else None
        layout = run.job.layout if run is not None and run.phase == "run" else None
        if run is None or layout is None:
            return []
        live = [name for name in run.job.survivors() if self.world.device(name) is not None]
        return [
            (first, second)
            for first in live
            for second in live
            if node_of(first) != node_of(second)
            and min(layout.copies({*run.job.dead, first, second})) > 0
            and not any(route.touches({first}) and route.touches({second}) for route in layout.routes)
        ]

    def _take_place(self, device: str) -> None:
        """It dies, and its node's spare takes its place."""
        node, _, index = device.rpartition("/")
        self.world.spare_takes_place(node, int(index))

    def _asked(self) -> bool:
        """Whether survivors are to report, and some have yet to."""
        machine = self.world.machine
        return machine is not None and machine.core.run is not None and machine.core.run.phase == "report"

    def _again(self, second: str, late: Sequence[str], gap_s: float, more_s: float, breaks: bool) -> None:
        for name in late:
            if breaks:
                self.world.after(gap_s / 2, self.world.network.break_link, name)
            else:
                self.world.network.lag(name, DAEMON, 2 * gap_s + more_s, gap_s + more_s)
        self.world.after(gap_s, self._take_place, second)

    def _die_with(self, name: str, down_s: float) -> None:
        self.world.daemon.restart(down_s)
        self.world.spare_takes_place(name)

    def _when(
        self, ready: Callable[[], bool], act: Callable[..., None], *args: Any, tries: int = 200
    ) -> None:
        """At the moment at which it is so, or soon after all."""
        if ready() or not tries:
            act(*args)
        else:
            self.world.after(0.0005, partial(self._when, tries=tries - 1), ready, act, *args)

    # ------------------------------------------------------------------ people

    def drain(self) -> bool:
        """Somebody drains a node, or has it back."""
        name = self.dice.choice(sorted(self.world.nodes))
        return self._ask(Drain(name, undo=self.dice.random() < 0.5))

    def ask(self) -> bool:
        """Somebody pauses the job, lets it go on, or wants a checkpoint."""
        return self._ask(Control(_JOB, self.dice.choice(["pause", "resume", "resume", "checkpoint"])))

    def _ask(self, request: AnyRequest) -> bool:
        if self.world.daemon.up:
            self.world.ask(request)
        return self.world.daemon.up

    def operate(self) -> None:
        """Once the weather is clear: what can be started is started, and nothing stays drained or paused;
        again and again, since a link may be given up later.
        """
        self.world.after(_OPERATOR_S, self.operate)
        if not (self.clear and self.world.daemon.up):
            return
        for name, node in sorted(self.world.nodes.items()):
            if not node.alive:
                self.world.add(name)
        for name in sorted(self.world.machine.core.state.drained):
            self.world.ask(Drain(name, undo=True))
        self.world.ask(Control(_JOB, "resume"))

    # ------------------------------------------------------------------ whom, and for how long

    def _names(self) -> list[str]:
        return [name for name, node in sorted(self.world.nodes.items()) if node.alive]

    def _node(self, fits: Callable[[SimNode], bool] = lambda _: True) -> SimNode | None:
        nodes = [self.world.nodes[name] for name in self._names() if fits(self.world.nodes[name])]
        return self.dice.choice(nodes) if nodes else None

    def _last(self, min_s: float, max_s: float) -> float:
        """A time that something lasts."""
        seconds = self.dice.uniform(min_s, max_s)
        self._lasts(seconds)
        return seconds

    def _lasts(self, seconds: float) -> None:
        self.clear_at = max(self.clear_at, self.world.now + seconds)


def _apart(link: Link) -> bool:
    """Whether its ends are live devices of two nodes."""
    source, target = link.source.sim, link.target.sim
    return source.alive and target.alive and source.node.name != target.node.name


KINDS: dict[str, Callable[[Hazards], bool]] = {
    "kill": Hazards.kill,
    "vanish": Hazards.vanish,
    "leave": Hazards.leave,
    "notice": Hazards.notice,
    "device": Hazards.device,
    "spare": Hazards.spare,
    "join": Hazards.join,
    "agent link": Hazards.agent_link,
    "device link": Hazards.device_link,
    "cut from daemon": Hazards.cut_daemon,
    "cut between nodes": Hazards.cut_nodes,
    "partition": Hazards.partition,
    "lag": Hazards.lag,
    "slow": Hazards.slow,
    "agent stopped": Hazards.pause_agent,
    "node stopped": Hazards.pause_node,
    "devices stopped": Hazards.stop_devices,
    "disk full": Hazards.disk_full,
    "daemon killed": Hazards.restart,
    "killed again": Hazards.again,
    "daemon killed ahead": Hazards.ahead,
    "clock jumped": Hazards.jump,
    "daemon stopped": Hazards.stall,
    "drain": Hazards.drain,
    "asked": Hazards.ask,
}
