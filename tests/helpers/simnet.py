"""The network of a simulated world: how long a message takes, and what becomes of one whose way is cut off.

Owns the order of messages and the links of agents to the daemon. Links between devices are the devices' own
(``simdevice.SimTransport``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oobleckd.core.events import Heard, LinkLost, Tell
from oobleckd.protocol.codec import decode_from_worker, decode_to_worker, encode
from tests.helpers.simagent import SimNode
from tests.helpers.simdevice import SimDevice

if TYPE_CHECKING:
    from tests.helpers.world import World


class Network:
    """In order per pair. ``links``: node -> the agent that is connected, and which of its connections it is.

    ``codec``: messages of agents and daemon are encoded and decoded on their way.
    """

    def __init__(self, world: World, *, codec: bool) -> None:
        self.world, self.codec = world, codec
        self.links: dict[str, tuple[SimNode, int]] = {}
        self.fifo: dict[tuple[int, int], float] = {}

    # ------------------------------------------------------------------ between devices

    def send(self, source: SimDevice, target: SimDevice, *letter: Any) -> None:
        """Lost with either life, unless it was on its way already."""
        when = self._arrival((id(source), id(target)), 0.0002, 0.003)
        self.world.at(when, self._arrive, target, letter)

    @staticmethod
    def _arrive(target: SimDevice, letter: tuple[Any, ...]) -> None:
        if target.alive:
            target.letter(*letter)

    # ------------------------------------------------------------------ between agents and the daemon

    def to_daemon(self, node: SimNode, message: Any) -> None:
        """An agent says something."""
        when = self._arrival((id(node), -1), 0.0001, 0.002)
        if self.codec:
            message = decode_from_worker(encode(message))
        self.world.at(when, self._at_daemon, self.world.daemon.life, node, node.link, message)

    def _at_daemon(self, life: int, node: SimNode, link: int, message: Any) -> None:
        # What a dead agent had sent still arrives; what was sent over a link that broke does not.
        if link == node.link and (node.connected or not node.alive):
            self.world.daemon.feed(life, Heard(node.name, message))

    def tell(self, command: Tell) -> None:
        """The daemon says something; dropped where nobody is connected."""
        node, link = self.links.get(command.node, (None, 0))
        if node is None:
            return
        message = decode_to_worker(encode(command.message)) if self.codec else command.message
        when = self._arrival((-1, id(node)), 0.0001, 0.002)
        self.world.at(when, self._at_agent, node, link, message)

    @staticmethod
    def _at_agent(node: SimNode, link: int, message: Any) -> None:
        if node.link == link and node.connected:
            node.from_daemon(message)

    def close_soon(self, node: SimNode) -> None:
        """The host of a dead agent closes its connection."""
        self.world.after(self.world.random.uniform(0.001, 0.03), self._closed, node, node.link)

    def _closed(self, node: SimNode, link: int) -> None:
        if self.links.get(node.name) == (node, link):
            del self.links[node.name]
            self.world.daemon.feed(self.world.daemon.life, LinkLost(node.name))

    def break_link(self, name: str) -> None:
        """The connection of a live agent breaks for a moment."""
        node = self.world.nodes[name]
        if node.alive and node.connected:
            node.disconnect()
            self.world.daemon.feed(self.world.daemon.life, LinkLost(node.name))

    def _arrival(self, pair: tuple[int, int], least_s: float, most_s: float) -> float:
        when = self.world.now + self.world.random.uniform(least_s, most_s)
        when = self.fifo[pair] = max(when, self.fifo.get(pair, 0.0))
        return when
