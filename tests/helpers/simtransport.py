"""Links between simulated devices, as ``oobleckd.worker.transport.transport`` has them.

What can happen to a link there, and so here: messages on one link keep their order, whatever their delay, but
those that can wait, which keep their own; messages on two links overtake each other. A link that breaks takes
with it what was on its way, and is not made again in this incarnation of the peer until both are deployed
anew; each end finds out for itself, one perhaps seconds after the other, and tells its agent of a peer's
incarnation once. Nothing is sent twice, and nothing is lost from a link that holds.

Owns the ends of links. How long a message takes is the network's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oobleckd.protocol.parts import Peer
from oobleckd.worker.transport.mailbox import Key, TensorMessage

if TYPE_CHECKING:
    from tests.helpers.simdevice import SimDevice

_KEPT_SECRETS = 2
_ASK_AGAIN_S = 0.02
_DRAIN_S = 1.0  # for which the sender of a broken link goes on reading what comes the other way


@dataclass(eq=False)
class Link:
    """One way from a device to an incarnation of a peer. It opens once that one has the sender's newest
    secret and has not forgotten the sender, who asks again and again.

    ``closed``: nothing on it arrives any more. ``ended``: its sender has, in order; what waits for it to open
    is dropped. ``arrival``: when the newest message on it arrives; ``late`` are those that can wait.
    """

    source: SimTransport
    target: SimTransport
    is_open: bool = False
    closed: bool = False
    ended: bool = False
    arrival: float = 0.0
    late: list[Waiting] = field(default_factory=list)


@dataclass(eq=False)
class Waiting:
    """A tensor message that can wait: it leaves and arrives at these times, unless it is taken back before it
    has left.
    """

    message: TensorMessage
    leaves: float
    arrival: float
    recalled: bool = False


class SimTransport:
    """Links to peers by address, which tells their incarnations apart."""

    def __init__(self, sim: SimDevice) -> None:
        self.sim, self.device, self.address = sim, sim.name, f"{sim.name}:{sim.incarnation}"
        self.known: dict[str, str] = {}
        self.links: dict[str, Link] = {}
        self.lost: set[str] = set()  # known peers whose links broke
        self.left: set[str] = set()
        self.forgotten: set[str] = set()
        self.secrets: list[bytes] = []
        self.numbers: dict[bytes, int] = {}  # of secrets, in the order in which they came
        self.named: dict[str, int] = {}  # address -> the secret with which it was named
        self.incoming: dict[str, list[Link]] = {}
        self.early: list[tuple[Link, TensorMessage]] = []

    def peers(self) -> frozenset[str]:
        return frozenset(self.known)

    def configure(self, peers: Mapping[str, Peer], secret: bytes, anew: Collection[str] = ()) -> None:
        self.secrets = [*self.secrets, secret][-_KEPT_SECRETS:]
        self.numbers.setdefault(secret, len(self.numbers))
        for name in sorted(anew):
            if (address := self.known.pop(name, None)) is not None:
                self.incoming.pop(address, None)
            self._end(name)
        for name, peer in peers.items():
            if self.known.get(name) != peer.address:
                self.links.pop(name, None)
                self.named[peer.address] = self.numbers[secret]
            self.known[name] = peer.address
            self.lost.discard(name)
            self.left.discard(peer.address)
            self.forgotten.discard(peer.address)
        self.open_early()
        for link in self.links.values():
            if not link.is_open:
                link.target.sim.after(_ASK_AGAIN_S, link.target.sim.asked_again)

    def open_early(self) -> None:
        """Take in what waits on links that may be open by now."""
        early, self.early = self.early, []
        for waiting in early:
            self.arrive(*waiting)

    def forget(self, peers: Collection[str]) -> None:
        for peer in sorted(peers):  # each end takes its time, which is drawn
            self._end(peer)
            self.lost.discard(peer)
            if (address := self.known.pop(peer, None)) is not None:
                self.forgotten.add(address)
                for link in self.incoming.pop(address, []):
                    link.closed = True
                    self.sim.world.network.refuse(link)

    def _end(self, peer: str) -> None:
        """The link to ``peer``, in order."""
        link = self.links.pop(peer, None)
        if link is not None and not link.closed:
            self.sim.world.network.end(link)

    def said_goodbye(self, link: Link) -> None:
        """The receiver of ``link`` wants no more."""
        peer = link.target.device
        if self.links.get(peer) is link:
            del self.links[peer]
            self.left.add(link.target.address)

    def send(
        self, peer: str, key: Key, tensors: Sequence[Any], meta: bytes = b"", *, later: bool = False
    ) -> bool:
        target = self.sim.world.device(peer)
        if target is None or self.known.get(peer) != target.transport.address:
            return False
        if peer in self.lost or target.transport.address in self.left:
            return False
        link = self.links.setdefault(peer, Link(self, target.transport))
        message = TensorMessage(key, self.device, meta, list(tensors))
        network = self.sim.world.network
        network.carry_later(link, message) if later else network.carry(link, message)
        return True

    def recall(self, peer: str, unwanted: Callable[[Key], bool]) -> list[Key]:
        link = self.links.get(peer)
        now, taken = self.sim.world.now, []
        for waiting in link.late if link is not None else ():
            if waiting.leaves > now and not waiting.recalled and unwanted(waiting.message.key):
                waiting.recalled = True
                taken.append(waiting.message.key)
        return taken

    def arrive(self, link: Link, message: TensorMessage) -> None:
        if link.closed:
            return
        if link.is_open:
            self.sim.mailbox.put(message)
        elif link.ended:
            pass
        elif link.source.secrets[-1] in self.secrets and link.source.address not in self.forgotten:
            link.is_open = True
            if self.numbers[link.source.secrets[-1]] >= self.named.get(link.source.address, 0):
                self.left.discard(link.source.address)
                self.incoming.setdefault(link.source.address, []).append(link)
            self.sim.mailbox.put(message)
        else:
            self.early.append((link, message))

    # ------------------------------------------------------------------ links that break

    def broke_out(self, link: Link) -> None:
        """The sender of a broken link finds out."""
        peer = link.target.device
        if self.links.get(peer) is link:
            wait_s = _DRAIN_S if self.incoming.get(link.target.address) else 0.0
            self.sim.after(wait_s, self._over, peer, link.target.address)

    def broke_in(self, link: Link) -> None:
        """Its receiver does."""
        links = self.incoming.get(link.source.address, [])
        if link in links:
            links.remove(link)
            self._over(link.source.device, link.source.address)

    def heard_goodbye(self, link: Link) -> None:
        """The sender of ``link`` ended it in order: nobody's loss."""
        links = self.incoming.get(link.source.address, [])
        if link in links:
            links.remove(link)
            self.left.add(link.source.address)
            self._over(link.source.device, link.source.address)

    def _over(self, peer: str, address: str) -> None:
        """A link with ``peer`` is over: a loss, if that is news and was not announced."""
        if self.known.get(peer) != address or peer in self.lost:
            return
        link = self.links.pop(peer, None)
        if link is not None and not link.closed:
            self.sim.world.network.end(link)
        if address not in self.left:
            self.lost.add(peer)
            self.sim._peer_lost(peer, "connection reset")


class SimGroupManager:
    """No groups: all messages take the transport."""

    def offer(self, *_message: object) -> bool:
        return False

    def enter(self, epoch: int, devices: object) -> None:
        pass

    def forget(self, peers: object) -> None:
        pass

    def leave(self) -> None:
        pass
