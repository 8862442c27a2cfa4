"""The agent's side of the warm spare: one process more, kept ready to take a dead device's place.

Owns its start, its restarts and its hand-over. When a place is taken by it is the agent's decision; what the
process does meanwhile is in ``process``. It holds no layers, uses no CPU while it waits and no GPU memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine

import msgspec

from oobleckd.protocol import codec
from oobleckd.protocol.job import Job
from oobleckd.protocol.nodemessages import LayersLoaded, LoadLayers
from oobleckd.protocol.parts import Spare
from oobleckd.words import count
from oobleckd.worker.agent.device_link import AgentSide
from oobleckd.worker.agent.outbox import peek
from oobleckd.worker.processes.children import Burials, Child, Watch

_loaded = msgspec.msgpack.Decoder(LayersLoaded)
_AGAIN_S = (1.0, 60.0)  # between starts of spares that end before they are ready
_FORK_BYTES = 40 * 2**20  # of a fork's own, until it is measured
_log = logging.getLogger(__name__)


class SpareKeeper:
    """At most one spare, a process that ``begin`` starts. ``on_change`` is called when there is something new
    to say of it, and ``on_heir`` with the place that was promised one and the process, None where there is
    none after all; the place may not want it any more (False).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        begin: Callable[[], Coroutine[None, None, Child]],
        is_quick: Callable[[], bool],
        watch: Watch,
        burials: Burials,
        *,
        on_change: Callable[[], None],
        on_heir: Callable[[str, Child | None], bool],
    ) -> None:
        self._loop = loop
        self._begin, self._is_quick = begin, is_quick
        self._starting: asyncio.Task[Child] | None = None
        self._watch = watch
        self._burials = burials
        self._on_change, self._on_heir = on_change, on_heir
        self._promised: deque[str] = deque()  # places
        self._child: Child | None = None
        self._link: AgentSide | None = None
        self._ready: Spare | None = None  # it has all it needs
        self._up = False  # it has imported what any job needs
        self._compiled: LoadLayers | None = None  # what devices of the node have compiled
        self._loading = 0  # orders to load layers that it has not answered
        self._failed_starts = 0
        self._again: asyncio.TimerHandle | None = None

    @property
    def state(self) -> Spare | None:
        """What there is to say of the spare; None while there is none."""
        if self._ready is not None or self._child is None:
            return self._ready
        return Spare(self._child.process.pid, memory_bytes=_FORK_BYTES if self._child.is_fork else 0)

    def keep(self) -> None:
        """See to it that there is a spare, now or in a while."""
        if self._child is not None or self._again is not None or self._starting is not None:
            return
        self._starting = self._loop.create_task(self._begin())
        self._starting.add_done_callback(self._started)

    def _started(self, starting: asyncio.Task[Child]) -> None:
        self._starting = None
        if starting.cancelled():
            return
        if (error := starting.exception()) is not None:
            _log.error("no spare can be started: %s", error)
            while self._promised:
                self._on_heir(self._promised.popleft(), None)
            self._try_again()
            return
        child = starting.result()
        self._watch.add(child)
        while self._promised:
            if self._on_heir(self._promised.popleft(), child):
                self.keep()
                return
        self._child = child
        self._link = AgentSide(self._loop, child.link, on_frame=self._heard, on_end=child.kill)

    def take(self, device: str) -> Child | None:
        """The spare, for the place of ``device``; None when there is none that is ready, or as good as that:
        a fork has all it needs.
        """
        child, link = self._child, self._link
        # A fork has all it needs from its birth on, and its order waits in its socket: so a spare is
        # missing for 20 ms and not for seconds. (D-devices-017)
        if child is None or link is None or not (self._up or child.is_fork):
            return None
        if child.process.poll() is not None:  # it was killed with the device, and we have not been told yet
            self._watch.discard([child])
            self._drop()
            return None
        link.close()
        child.is_loading = self._loading > 0
        self._forget()
        child.device = device
        return child

    def promise(self, device: str) -> bool:
        """Whether the next fork is to take the place of ``device``: in milliseconds, or in a second or two
        where the forker itself is just being made anew.
        """
        if self._child is not None or not self._is_quick():
            return False
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self.keep()
        self._promised.append(device)
        return True

    def compiled(self, job: Job | None) -> None:
        """Devices of this node have the compiled layers of ``job`` (None: of none), so a spare, this one or
        the next, is ready when it has loaded them.
        """
        order = LoadLayers(job) if job is not None else None
        if order == self._compiled:
            return
        self._compiled = order
        if order is not None and self._up:
            self._ready = None
            self._load(order)
            self._on_change()

    def _load(self, order: LoadLayers) -> None:
        assert self._link is not None
        self._loading += 1
        self._link.send(codec.encode(order))

    def forget_promises(self) -> None:
        """No place is waiting any more."""
        self._promised.clear()

    def ended(self, child: Child, evidence: str) -> bool:
        """Whether ``child``, which has ended, was the spare; another one is then started in a while."""
        if child is not self._child:
            return False
        _log.warning("the spare (pid %d) ended: %s", child.process.pid, evidence)
        if self._ready is not None:
            self._failed_starts = -1
        self._drop()
        self._try_again()
        self._on_change()
        return True

    def _try_again(self) -> None:
        self._failed_starts += 1
        delay_s = min(_AGAIN_S[0] * 2**self._failed_starts, _AGAIN_S[1])
        self._again = self._loop.call_later(delay_s, self._start_again)

    async def close(self) -> None:
        """End the spare."""
        if self._again is not None:
            self._again.cancel()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._child is not None:
            self._watch.discard([self._child])
            self._child.kill()
            self._drop()

    def _heard(self, data: bytes) -> None:
        try:
            kind = peek(data).type
        except codec.CodecError as error:
            _log.error("the spare sent what is no message: %s", error)
            return
        if self._child is None:
            return
        if kind == "SpareUp":
            self._failed_starts, self._up = 0, True
            if self._compiled is not None:
                self._load(self._compiled)
        elif kind == "LayersLoaded":
            self._loading -= 1
            kinds = count(_loaded.decode(data).kinds, "kind")
            _log.info("the spare (pid %d) has loaded %s of layers", self._child.process.pid, kinds)
        if self._up and not self._loading:
            # Nothing is left to be compiled or loaded in a place that it takes. (D-compile-011)
            self._ready = Spare(self._child.process.pid, ready=True, memory_bytes=self._child.own_bytes())
            self._on_change()

    def _forget(self) -> None:
        self._child = self._link = self._ready = None
        self._up, self._loading = False, 0

    def _start_again(self) -> None:
        self._again = None
        self.keep()

    def _drop(self) -> None:
        child, link = self._child, self._link
        assert child is not None
        assert link is not None
        link.close()
        self._forget()
        self._burials.add(child)
