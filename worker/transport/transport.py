"""Tensor messages between device processes: Unix sockets and shared memory on one host, TCP between hosts.

Owns the listeners, the peers and the reader threads: one per incoming link, and one writer thread per
outgoing link (``outgoing``), so that a silent host holds up nobody else. A link carries messages one
way; the other direction bears nothing but a goodbye. Knows nothing of steps and epochs: after a failure there
is nothing to rebuild here, the dead are forgotten and the rest stays as it is.

An **incarnation** of a peer is one process of that name, told by its addresses.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from oobleckd.protocol.parts import Peer
from oobleckd.worker.runtime.deaths import is_out_of_memory
from oobleckd.worker.runtime.errors import ends_the_process
from oobleckd.worker.transport import handshake, sockets, wire
from oobleckd.worker.transport.handshake import Greeting
from oobleckd.worker.transport.mailbox import Key, TensorMessage
from oobleckd.worker.transport.outgoing import Outgoing

_HANDSHAKE_S = 10.0
_DRAIN_S = 1.0  # how long a broken outgoing link waits for the incoming one to be read to its end
_JOIN_S = 2.0
_ACCEPT_PAUSE_S = 0.05
_MAX_STRANGERS = 64  # connections that have not proved themselves yet
_KEPT_SECRETS = 2  # the present one, and the one before it for peers that hear of the new one later
_log = logging.getLogger(__name__)


class Inbox(Protocol):
    """Where messages go, from any number of threads: a mailbox, or what sorts messages before it."""

    def put(self, message: TensorMessage) -> None:
        """Take a message; never blocks. Raises WireError for one that nobody can have meant to send."""


@dataclass(slots=True)
class Counts:
    """Totals. ``dropped`` messages are among the sent; ``refused``: connections that proved nothing."""

    sent_messages: int = 0
    sent_bytes: int = 0
    dropped: int = 0
    refused: int = 0


@dataclass(slots=True)
class _Known:
    """A peer as ``configure`` named it, with which secret. ``lost``: it was reported in this incarnation."""

    peer: Peer
    incarnation: str
    secret: int
    link: Outgoing | None = None
    lost: bool = False


def _incarnation(address: str, local: str) -> str:
    return f"{address} {local}"


# Our own between CPU devices: a blocked collective cannot be interrupted and takes its group with it. This
# is as fast and has nothing to rebuild. (D-transport-001)
class Transport:
    """The transport of device ``device`` on host ``host``.

    Tensor messages land in ``inbox``. ``on_peer_lost(peer, why)`` is called, from one of the transport's
    threads, once for each incarnation of a configured peer whose link broke without a goodbye, after what it
    had sent lies in the mailbox. ``room(key, bytes)`` is entered while a message's tensors are read and it is
    put. ``handshake_s`` bounds how long a peer may take to become ready. Raises OSError when ``bind`` is no
    address of this host or ``local_dir`` cannot be used.
    """

    def __init__(
        self,
        device: str,
        host: str,
        inbox: Inbox,
        *,
        bind: str = "127.0.0.1",
        local_dir: Path,
        on_peer_lost: Callable[[str, str], None],
        handshake_s: float = _HANDSHAKE_S,
        room: Callable[[Key, int], AbstractContextManager[object]] = lambda _key, _bytes: nullcontext(),
    ) -> None:
        self.device = device
        self.host = host
        self.counts = Counts()
        self._inbox = inbox
        self._on_peer_lost = on_peer_lost
        self._handshake_s = handshake_s
        self._room = room
        self._changed = threading.Condition()
        self._known: dict[str, _Known] = {}
        self._secrets: dict[bytes, bytes] = {}
        self._numbers: dict[bytes, int] = {}  # of secrets, in the order in which they came
        self._forgotten: set[str] = set()
        self._left: set[str] = set()
        self._incoming: dict[str, set[socket.socket]] = {}
        self._sockets: set[socket.socket] = set()
        self._dismissed: set[socket.socket] = set()  # incoming links that we ended ourselves
        self._threads: set[threading.Thread] = set()
        self._strangers = 0
        self._closed = False
        self._unblocked = threading.Event()  # not set: messages neither leave nor arrive (``block``)
        self._unblocked.set()
        self._tcp = sockets.listen_tcp(bind)
        self.address = sockets.tcp_address(self._tcp)
        self._unix, self.local = sockets.listen_unix(local_dir, device)
        self._spawn(self._accept, "transport-accept")

    @property
    def peer(self) -> Peer:
        """How others reach this device."""
        return Peer(self.address, self.local, self.host)

    def peers(self) -> frozenset[str]:
        """The peers that are configured and not forgotten."""
        with self._changed:
            return frozenset(self._known)

    def configure(self, peers: Mapping[str, Peer], secret: bytes, anew: Collection[str] = ()) -> None:
        """Add or update ``peers``; ``secret`` opens new links, old links stay, but those to ``anew`` of them.

        A peer that was forgotten, said goodbye or was lost gets another chance. A peer in a new incarnation
        replaces the old one, whose links are closed. What an old link from ``anew`` still brings is taken in,
        and its end says nothing.
        """
        with self._changed:
            name = handshake.key_name(secret)
            self._secrets.pop(name, None)
            self._secrets[name] = secret
            self._numbers.setdefault(name, len(self._numbers))
            while len(self._secrets) > _KEPT_SECRETS:
                del self._secrets[next(iter(self._secrets))]
            # Both ends of a link hear in their own time that the other has given the job back, so links of
            # a plan of which nothing came are made anew. (D-transport-008)
            before = [self._known.pop(name) for name in sorted(anew) if name in self._known]
            for known in before:
                self._dismissed.update(self._incoming.get(known.incarnation, ()))
            replaced = [x for n, peer in peers.items() if (x := self._set_peer(n, peer)) is not None]
            self._changed.notify_all()
        for known in before:
            if known.link is not None:
                known.link.stop()
        for known in replaced:
            self._close_links(known)

    def forget(self, peers: Iterable[str]) -> None:
        """Close all links to ``peers``, drop what is queued for them, and let them in no more."""
        with self._changed:
            gone = [self._known.pop(name) for name in peers if name in self._known]
            self._forgotten.update(known.incarnation for known in gone)
        for known in gone:
            self._close_links(known)

    def send(
        self, peer: str, key: Key, tensors: Sequence[Tensor], meta: bytes = b"", *, later: bool = False
    ) -> bool:
        """Send a message; never blocks. ``later``: it leaves when no other does. False: dropped, as ``peer``
        is unknown, forgotten, lost or left.

        Contiguous CPU tensors need not be copied: they must not change until ``flush`` or an answer.
        Raises WireError for a dtype that has no form on the wire.
        """
        with self._changed:
            link = self._link_to(peer)
        frame_of = wire.message_frame if link is None or later else link.frame_of
        frame = frame_of(key, tensors, meta)
        with self._changed:
            self.counts.sent_messages += 1
            self.counts.sent_bytes += frame.num_bytes
        if link is not None and (link.send_later(key, frame) if later else link.send(frame)):
            return True
        frame.drop()
        with self._changed:
            self.counts.dropped += 1
        return False

    def recall(self, peer: str, unwanted: Callable[[Key], bool]) -> list[Key]:
        """Take back messages to ``peer`` that were to leave later and have not begun to; their keys."""
        with self._changed:
            known = self._known.get(peer)
            link = known.link if known is not None else None
        taken = link.recall(unwanted) if link is not None else []
        with self._changed:
            self.counts.dropped += len(taken)
        return taken

    def flush(self, timeout: float) -> bool:
        """Wait until every message is in the kernel's hands; False when ``timeout`` s were not enough."""
        deadline = time.monotonic() + timeout
        with self._changed:
            links = [known.link for known in self._known.values() if known.link is not None]
        return all(link.flush(deadline) for link in links)

    def block(self, seconds: float) -> None:
        """Let nothing in or out, as a network does that is gone; for good if ``seconds`` is 0.

        Links stay open and no end of theirs is noticed. Afterwards what was on its way goes on.
        """
        self._unblocked.clear()
        if seconds:
            timer = threading.Timer(seconds, self._unblocked.set)
            timer.daemon = True
            timer.start()

    def close(self) -> None:
        """Say goodbye to all peers, so that they report no loss, close everything, end all threads."""
        self._unblocked.set()
        self.flush(_DRAIN_S)
        with self._changed:
            self._closed = True
            known = list(self._known.values())
            self._known.clear()
            self._changed.notify_all()
        for listener in (self._tcp, self._unix):
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        for each in known:
            self._close_links(each)
        with self._changed:
            incoming, threads = list(self._sockets), list(self._threads)
        for sock in incoming:
            _say_goodbye(sock)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        self._tcp.close()
        self._unix.close()
        Path(self.local).unlink(missing_ok=True)

    # ------------------------------------------------------------------ peers

    def _set_peer(self, name: str, peer: Peer) -> _Known | None:
        """Enter ``peer``; what it replaces. Under the lock."""
        if name == self.device:
            return None
        incarnation = _incarnation(peer.address, peer.local)
        self._forgotten.discard(incarnation)
        self._left.discard(incarnation)
        old = self._known.get(name)
        if old is not None and old.incarnation == incarnation and not old.lost:
            return None
        newest = next(reversed(self._secrets))
        self._known[name] = _Known(peer, incarnation, self._numbers[newest])
        return old if old is not None and old.incarnation != incarnation else None

    def _link_to(self, name: str) -> Outgoing | None:
        """The link on which to send to ``name``, new if need be. Under the lock."""
        known = self._known.get(name)
        if known is None or known.lost or known.incarnation in self._left:
            return None
        if known.link is None:
            known.link = Outgoing(
                known.peer,
                unix=known.peer.host == self.host,
                timeout_s=self._handshake_s,
                spawn=self._spawn,
                greet=lambda sock: self._greet(sock, name),
                unblocked=self._unblocked,
                on_end=lambda link, why: self._outgoing_ended(name, link, why),
            )
        return known.link

    def _greet(self, sock: socket.socket, target: str) -> bool:
        with self._changed:
            secret = next(reversed(self._secrets.values()))
        incarnation = _incarnation(self.address, self.local)
        return handshake.connect(
            sock, source=self.device, incarnation=incarnation, target=target, secret=secret
        )

    def _close_links(self, known: _Known) -> None:
        if known.link is not None:
            known.link.stop()
        with self._changed:
            incoming = list(self._incoming.get(known.incarnation, ()))
            self._dismissed.update(incoming)
        for sock in incoming:
            _say_goodbye(sock)

    def _outgoing_ended(self, name: str, link: Outgoing, why: str | None) -> None:
        with self._changed:
            known = self._known.get(name)
            # All give a job back and are in the next layout at once. A thread that heard a goodbye last
            # marked a peer as gone that had just been named again: the job stood still. (D-transport-007)
            if known is None or known.link is not link:
                # The peer may be configured again by now: an end of before says nothing of its new links.
                return
            if why is None:
                self._left.add(known.incarnation)
            else:
                # A dead process' sockets close one after the other: first read what it has sent us.
                self._changed.wait_for(
                    lambda: not self._incoming.get(known.incarnation) or self._closed, _DRAIN_S
                )
        self._ended(name, known, why)

    def _ended(self, name: str, known: _Known, why: str | None) -> None:
        """A link to ``known`` is over: report it if that is news."""
        with self._changed:
            if self._closed or self._known.get(name) is not known or known.lost:
                return
            link, known.link = known.link, None
            if known.incarnation not in self._left:
                known.lost = True
        if link is not None:
            link.stop()
        if known.lost:
            self._on_peer_lost(name, why or "closed")

    # ------------------------------------------------------------------ incoming links

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                with ends_the_process("receive", only=is_out_of_memory):
                    target()
            finally:
                with self._changed:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._changed:  # ``close`` joins those that it sees, so all that it sees have been started
            self._threads.add(thread)
            thread.start()

    def _accept(self) -> None:
        listeners = {listener.fileno(): listener for listener in (self._tcp, self._unix)}
        poller = select.poll()
        for fd in listeners:
            poller.register(fd, select.POLLIN)
        while not self._closed:
            for fd, _ in poller.poll():
                try:
                    sock, _ = listeners[fd].accept()
                except OSError as error:
                    self._accept_failed(error)
                    continue
                self._admit(sock)

    def _accept_failed(self, error: OSError) -> None:
        with self._changed:
            if not self._closed:
                _log.warning("%s: accept: %s", self.device, error)
                self._changed.wait(_ACCEPT_PAUSE_S)  # out of descriptors: the condition lasts

    def _admit(self, sock: socket.socket) -> None:
        with self._changed:
            if self._closed or self._strangers >= _MAX_STRANGERS:
                self.counts.refused += 1
                sock.close()
                return
            self._strangers += 1
            self._sockets.add(sock)
            self._spawn(lambda: self._serve(sock), "transport-reader")

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                greeting = self._meet(sock)
                if greeting is not None:
                    self._read(sock, greeting)
            finally:
                with self._changed:
                    self._sockets.discard(sock)

    def _meet(self, sock: socket.socket) -> Greeting | None:
        """Shake hands with a stranger; None when that failed."""
        sock.settimeout(self._handshake_s)
        try:
            greeting = handshake.accept(sock, device=self.device, find_secret=self._find_secret)
        except OSError as error:
            with self._changed:
                self._strangers -= 1
                self.counts.refused += 1
            _log.warning("%s: refused a connection: %s", self.device, error)
            return None
        sock.settimeout(None)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            self._strangers -= 1
            if self._is_of_before(greeting):
                # That peer is late and ends the link when it hears what made us name it anew; it was marked
                # as gone for good. (D-transport-009)
                self._dismissed.add(sock)
            else:
                self._left.discard(greeting.incarnation)
            self._incoming.setdefault(greeting.incarnation, set()).add(sock)
        return greeting

    def _is_of_before(self, greeting: Greeting) -> bool:
        """Whether the peer opens a link with a secret older than the one with which it was named: it is late,
        and has yet to hear of what made us name it anew. It will end that link when it does, which says
        nothing of the next.
        """
        known = self._known.get(greeting.source)
        return (
            known is not None
            and known.incarnation == greeting.incarnation
            and self._numbers[greeting.key] < known.secret
        )

    def _find_secret(self, greeting: Greeting) -> bytes | None:
        # A peer may hear of a new layout, and connect, a little before we do.
        def known() -> bool:
            return greeting.key in self._secrets and greeting.incarnation not in self._forgotten

        with self._changed:
            self._changed.wait_for(lambda: known() or self._closed, self._handshake_s / 2)
            return self._secrets[greeting.key] if known() and not self._closed else None

    def _read(self, sock: socket.socket, greeting: Greeting) -> None:
        why = None
        reader = wire.MessageReader(sock, greeting.source)
        try:
            while (head := reader.head()) is not None:
                with self._room(head.body.key, head.num_bytes):
                    message = reader.message(head)
                    self._unblocked.wait()
                    self._inbox.put(message)
                del message  # its memory is wanted again before the next one comes
        except (OSError, EOFError, wire.WireError) as error:
            if is_out_of_memory(error):
                raise
            why = str(error) or type(error).__name__
        finally:
            reader.close()
        self._unblocked.wait()
        with self._changed:
            links = self._incoming[greeting.incarnation]
            links.discard(sock)
            if not links:
                del self._incoming[greeting.incarnation]
            # As in ``_outgoing_ended``: the end of a link that we closed ourselves, be it the goodbye of one
            # who closed it, too.
            dismissed = sock in self._dismissed
            self._dismissed.discard(sock)
            if why is None and not dismissed:
                self._left.add(greeting.incarnation)
            known = self._known.get(greeting.source)
            self._changed.notify_all()
        if not dismissed and known is not None and known.incarnation == greeting.incarnation:
            self._ended(greeting.source, known, why)


def _say_goodbye(sock: socket.socket) -> None:
    """End an incoming link from our side: its other end must not take that for a loss."""
    with suppress(OSError):
        wire.goodbye_frame().write_now(sock)
        sock.shutdown(socket.SHUT_RDWR)
