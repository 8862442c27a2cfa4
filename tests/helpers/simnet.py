"""The network of a simulated world: how long a message takes, and what becomes of one whose way is cut off.

What can happen on the way, and so here:

- Between an agent and the daemon (ZeroMQ over TCP): messages on one connection keep their order and none is missing, so
  loss shows as a connection that ends, with what was on its way gone. Each end finds out for itself, one of them perhaps
  seconds later (half open); meanwhile the agent may be back on a new connection. What was sent on the old one before its
  agent closed it may then still arrive, after words of the new one. ZeroMQ itself closes a connection that is silent for
  8 to 11 s. Nothing arrives twice, but what an agent says again on a new connection.
- Between devices (``simtransport``): the same, but a link that broke is not made again.
- A way that is cut, be it in one direction alone, ends no connection: TCP sends again, less and less often, and what is on
  its way arrives in order some time after the cut, later by as much again at most. Nobody connects meanwhile.

Owns the time on the way, connections of agents and what is cut. The links of devices are the devices' own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oobleckd.core.events import Heard, LinkLost, Tell
from oobleckd.daemon.connections import Connection, Connections
from oobleckd.protocol.agentmessages import Hello
from oobleckd.protocol.codec import decode_from_worker, decode_to_worker, encode
from oobleckd.protocol.messages import OpTimes
from oobleckd.worker.transport.mailbox import TensorMessage
from tests.helpers.simagent import SimNode
from tests.helpers.simtransport import Link, Waiting

if TYPE_CHECKING:
    from tests.helpers.world import World

DAEMON = ""
_DEVICES_S, _AGENTS_S = (0.0002, 0.003), (0.0001, 0.002)
_LATER_S = (0.0, 0.03)  # until a message leaves that can wait
_END_S, _CLOSED_S = (
    (0.001, 0.03),
    (0.001, 0.1),
)  # until the sockets of a dead agent, and of a dead device, are closed
_AGENT_SILENCE_S, _DAEMON_SILENCE_S = (8.0, 10.0), (10.0, 11.0)  # until ZeroMQ closes: its heartbeats
_LATEST_S = 3.0  # after a cut until TCP sends again, at most


@dataclass(eq=False, kw_only=True)
class Wire(Connection):
    """A connection of ``agent`` to one incarnation of the daemon. Each end learns of its end for itself.

    ``broken``: what is on its way is gone. ``up``, ``down``: when the newest message in that direction
    arrives.
    """

    agent: SimNode
    daemon_incarnation: int
    agent_open: bool = True
    daemon_open: bool = True
    broken: bool = False
    up: float = 0.0
    down: float = 0.0


class Network:
    """``connections``: those that the daemon in its present incarnation has heard of. ``cuts``: (from, to) ->
    until when nothing gets there; ``lags``: (from, to) -> (seconds more on the way, until when). Ends are
    nodes, or ``DAEMON``.

    ``codec``: messages of agents and daemon are encoded and decoded on their way.
    """

    def __init__(self, world: World, *, codec: bool) -> None:
        self.world, self.codec = world, codec
        self.connections = self._new_connections()
        self.cuts: dict[tuple[str, str], float] = {}
        self.lags: dict[tuple[str, str], tuple[float, float]] = {}

    def _new_connections(self) -> Connections[Wire]:
        """What a daemon that starts has heard: nothing."""
        feed, connections = self.world.daemon.feed_now, Connections[Wire]()
        connections.listen(lambda node, said: feed(Heard(node, said)), lambda node: feed(LinkLost(node)))
        return connections

    # ------------------------------------------------------------------ time on the way

    def _arrival(self, source: str, target: str, bounds_s: tuple[float, float]) -> float:
        world = self.world
        sender = world.nodes.get(source)
        when = world.now + world.random.uniform(*bounds_s) * (sender.slow if sender else 1.0)
        extra_s, until = self.lags.get((source, target), (0.0, 0.0))
        if world.now < until:
            when += extra_s * world.random.uniform(0.5, 1.0)
        end = self.cuts.get((source, target), 0.0)
        if when < end:
            when = end + world.random.uniform(0.0, min(end - world.now, _LATEST_S))
        return when

    def cut(self, source: str, target: str, seconds: float) -> None:
        """Nothing gets from ``source`` to ``target`` for so long."""
        world = self.world
        self.cuts[source, target] = max(self.cuts.get((source, target), 0.0), world.now + seconds)
        if DAEMON in {source, target}:
            world.checks.excuse(source or target, seconds + _LATEST_S)
            connection = world.nodes[source or target].connection
            if connection is not None:
                if target == DAEMON:
                    silent_s = world.random.uniform(*_DAEMON_SILENCE_S)
                    world.after(silent_s, self._in_daemon, self._daemon_silent, connection)
                else:
                    silent_s = world.random.uniform(*_AGENT_SILENCE_S)
                    world.after(silent_s, connection.agent.agent.call, self._agent_silent, connection)

    def lag(self, source: str, target: str, extra_s: float, seconds: float) -> None:
        """For ``seconds`` what leaves ``source`` for ``target`` takes up to ``extra_s`` longer."""
        if DAEMON in {source, target}:
            self.world.checks.excuse(source or target, seconds + extra_s)
        self.lags[source, target] = (extra_s, self.world.now + seconds)

    def until_closed_s(self, source: str, target: str) -> float:
        """When ``target`` sees the sockets of a process close that died on ``source`` now."""
        return self._arrival(source, target, _CLOSED_S) - self.world.now

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing gets from ``source`` to ``target``."""
        return self.world.now < self.cuts.get((source, target), 0.0)

    def severed(self, node: str) -> bool:
        """Whether the agent of ``node`` cannot connect."""
        return self.is_cut(node, DAEMON) or self.is_cut(DAEMON, node)

    # ------------------------------------------------------------------ between devices

    def carry(self, link: Link, message: TensorMessage) -> None:
        """Lost with the link, or with either incarnation unless it was on its way already."""
        source, target = link.source.sim.node.name, link.target.sim.node.name
        link.arrival = max(self._arrival(source, target, _DEVICES_S), link.arrival)
        self.world.at(link.arrival, link.target.sim.node.host.call, self._arrive, link, message)

    def carry_later(self, link: Link, message: TensorMessage) -> None:
        """The same for one that can wait: others overtake it, and until it leaves it can be taken back."""
        source, target = link.source.sim.node.name, link.target.sim.node.name
        now, last = self.world.now, link.late[-1] if link.late else None
        leaves = max(now + self.world.random.uniform(*_LATER_S), last.leaves if last else 0.0)
        arrival = max(leaves + self._arrival(source, target, _DEVICES_S) - now, last.arrival if last else 0.0)
        waiting = Waiting(message, leaves, arrival)
        link.late = [each for each in link.late if each.arrival > now] + [waiting]
        self.world.at(arrival, link.target.sim.node.host.call, self._arrive_late, link, waiting)

    def _arrive_late(self, link: Link, waiting: Waiting) -> None:
        if not waiting.recalled:
            self._arrive(link, waiting.message)

    @staticmethod
    def _arrive(link: Link, message: TensorMessage) -> None:
        if link.target.sim.alive:
            link.target.sim.tensor_message(link, message)

    def end(self, link: Link) -> None:
        """Its sender ends a link in order, behind all messages."""
        link.ended = True
        source, target = link.source.sim.node.name, link.target.sim.node.name
        late = max((each.arrival for each in link.late), default=0.0)
        when = max(self._arrival(source, target, _DEVICES_S), link.arrival, late)
        self.world.at(when, link.target.sim.node.host.call, link.target.heard_goodbye, link)

    def refuse(self, link: Link) -> None:
        """Its receiver ends a link in order: what is on its way is lost, and its sender hears of it."""
        source, target = link.source.sim.node.name, link.target.sim.node.name
        when = self._arrival(target, source, _DEVICES_S)
        self.world.at(when, link.source.sim.node.host.call, link.source.said_goodbye, link)

    def reset_devices(self, link: Link, source_s: float, target_s: float) -> None:
        """A link between devices breaks; after so long its ends find out."""
        link.closed = True
        link.source.sim.after(source_s, link.source.broke_out, link)
        link.target.sim.after(target_s, link.target.broke_in, link)

    # ------------------------------------------------------------------ between agents and the daemon

    def open(self, node: SimNode) -> Wire:
        """A new connection of an agent to the daemon that is there."""
        return Wire(agent=node, daemon_incarnation=self.world.daemon.incarnation)

    def to_daemon(self, node: SimNode, message: Any) -> None:
        """An agent says something."""
        connection = node.connection
        assert connection is not None
        if not isinstance(
            message, OpTimes
        ):  # those come right behind their step, and turn the dice for nobody
            connection.up = max(self._arrival(node.name, DAEMON, _AGENTS_S), connection.up)
        if self.codec:
            message = decode_from_worker(encode(message))
        self.world.at(connection.up, self._in_daemon, self._at_daemon, connection, message)

    def _in_daemon(self, act: Callable[..., None], *args: Any) -> None:
        self.world.daemon.process.call(act, *args)

    def _at_daemon(self, connection: Wire, message: Any) -> None:
        # What a dead agent had sent still arrives; what was sent over a connection that broke does not.
        if connection.broken or not connection.daemon_open:
            return
        if connection.daemon_incarnation != self.world.daemon.incarnation:
            return
        if not isinstance(message, Hello):
            self.connections.heard(connection, message)
        elif not connection.replaced:
            self.connections.introduced(connection, connection.agent.name, message)

    def tell(self, command: Tell) -> None:
        """The daemon says something; dropped where nobody is connected."""
        connection = self.connections.of(command.node)
        if connection is None:
            return
        message = decode_to_worker(encode(command.message)) if self.codec else command.message
        connection.down = max(self._arrival(DAEMON, command.node, _AGENTS_S), connection.down)
        self.world.at(connection.down, connection.agent.agent.call, self._at_agent, connection, message)

    @staticmethod
    def _at_agent(connection: Wire, message: Any) -> None:
        if connection.agent_open and connection.agent.connected and not connection.broken:
            connection.agent.from_daemon(message)

    # ------------------------------------------------------------------ ends of connections

    def close(self, node: SimNode) -> None:
        """The agent is dead: its host closes its connection, behind all that it has said."""
        connection = node.connection
        if connection is not None and connection.agent_open:
            connection.agent_open = False
            when = max(self._arrival(node.name, DAEMON, _END_S), connection.up)
            self.world.at(when, self._in_daemon, self._daemon_sees_end, connection)

    def break_link(self, name: str, agent_s: float = 0.0, daemon_s: float = 0.0) -> None:
        """The connection of a live agent breaks, with what is on its way; after so long its ends find out."""
        node = self.world.nodes[name]
        if node.alive and node.connected and node.connection is not None:
            node.connection.broken = True
            self.world.checks.excuse(name, max(agent_s, daemon_s))
            self.world.after(agent_s, node.agent.call, self._agent_sees_end, node.connection)
            self.world.after(daemon_s, self._in_daemon, self._daemon_sees_end, node.connection)

    def hang_up(self) -> None:
        """The daemon is gone; agents find out at once."""
        for node in self.world.nodes.values():
            node.connected = False
            if node.connection is not None:
                node.connection.agent_open = False
        self.connections = self._new_connections()

    def _agent_sees_end(self, connection: Wire) -> None:
        if connection.agent_open:
            connection.agent_open = False
            if connection.agent.alive:
                connection.agent.disconnected()

    def _daemon_sees_end(self, connection: Wire) -> None:
        if not connection.daemon_open:
            return
        connection.daemon_open = False
        if connection.daemon_incarnation == self.world.daemon.incarnation:
            self.connections.closed(connection)

    def _agent_silent(self, connection: Wire) -> None:
        """ZeroMQ's heartbeat of the agent: nothing has come for seconds. It closes; what it has said still
        arrives.
        """
        if self.is_cut(DAEMON, connection.agent.name) and connection.agent_open:
            self._agent_sees_end(connection)
            when = max(self._arrival(connection.agent.name, DAEMON, _AGENTS_S), connection.up)
            self.world.at(when, self._in_daemon, self._daemon_sees_end, connection)

    def _daemon_silent(self, connection: Wire) -> None:
        if self.is_cut(connection.agent.name, DAEMON) and connection.daemon_open:
            self._daemon_sees_end(connection)
            when = max(self._arrival(DAEMON, connection.agent.name, _AGENTS_S), connection.down)
            self.world.at(when, connection.agent.agent.call, self._agent_sees_end, connection)
