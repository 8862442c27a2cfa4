"""The device process: one per device, owns torch, lives through every reconfiguration.

Owns the loop (controls, then the deployment under way, then the executor), what a control message does, and the answer to
a report in the middle of a task.
Started by the agent (``process``); ends with it. Training itself is in ``executor``.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor

from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import (
    Ack,
    Decide,
    Deploy,
    DeviceFailed,
    DeviceUp,
    Flag,
    FromWorker,
    Inject,
    LinkDown,
    Measure,
    Measured,
    Ready,
    Refused,
    Release,
    Report,
    Resume,
    ToWorker,
    Welcome,
)
from oobleckd.protocol.parts import Counters, DeviceInfo, Flags
from worker.commit import ReplicasDisagree
from worker.data import open_corpus
from worker.deploy import Deployment
from worker.errors import UserError, ends_the_process
from worker.executor import Executor
from worker.faults import ANYWHERE, Faults, hang_for_ever
from worker.groups.choose import choose
from worker.groups.plane import Plane
from worker.link import DeviceLink
from worker.mailbox import Key, Mailbox
from worker.measure import measure
from worker.models import load_spec
from worker.post import TransportPost
from worker.pulse import LOOK_UP_S, Pulse
from worker.store import Store
from worker.tasks import order_of
from worker.transport import Transport
from worker.turn import Turn
from worker.writer import Beside

SDC_HINT = "a device computes wrong bits: find it with a memory and burn-in test; resume from a checkpoint"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process runs: its name and kind, the host it shares with local peers, its folders; ``urgent``: whether
    it answers before ordinary programs have their turn.
    """

    device: str
    kind: str
    host: str
    bind: str
    run_dir: Path
    urgent: bool = False


class DeviceProcess:
    """Controls in, training state and answers out."""

    def __init__(self, place: Place, fd: int, pulse: Pulse) -> None:
        self.place, self.pulse = place, pulse
        self.executor: Executor | None = None
        self.deployment: Deployment | None = None
        self.job_id = ""
        self.mailbox, self.turn = Mailbox(), Turn()
        self.torch_device = torch_device(place)
        backend, road = choose(self.torch_device)
        _log.info("%s: letters take %s", place.device, road)
        self.link = DeviceLink(fd, self.mailbox, on_control=self._answer_at_once, urgent=place.urgent)
        self.plane = Plane(place.device, self.mailbox, backend, self._send)
        self.transport = Transport(
            place.device,
            place.host,
            self.plane,
            bind=place.bind,
            local_dir=place.run_dir,
            on_peer_lost=self._peer_lost,
        )
        self.post = TransportPost(self.transport, self.plane, self.mailbox, self.torch_device)
        self.faults = Faults(place.device, place.run_dir)

    def run(self) -> None:
        """Serve until the agent ends this process."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._tell_up()
        while True:
            with self.turn:
                worked = self._turn()
            while not worked and not self.mailbox.wait(LOOK_UP_S):
                with self.turn:
                    self.pulse.wait()

    def _turn(self) -> bool:
        """Heed what is said, then do one piece of work; False when there was none."""
        controls = self.mailbox.controls()
        for control in controls:
            self._guarded(control)
        if controls:
            self._tell_up()
        worked = self._work()
        if not worked:
            self.pulse.wait()
        return worked

    def _answer_at_once(self) -> None:
        """Called by the link, in its thread, for every message."""
        if isinstance(self.mailbox.next_control(), Report):
            with ends_the_process(), self.turn:
                self._answer()

    def _answer(self) -> None:
        """Answer a report while a layer computes. Not where the answer changes weights or layers, with which it computes:
        then the loop does it.
        """
        busy = self.deployment is not None or (
            self.executor is not None and self.executor.hurried is not None
        )
        if not busy and isinstance(report := self.mailbox.next_control(), Report):
            self.mailbox.remove_control(report)
            self._guarded(report)
            self._tell_up()

    def _work(self) -> bool:
        """One piece of work; False when there is none."""
        try:
            if self.deployment is not None and self.deployment.awaited:
                with self.pulse.doing("copy", units=0):
                    if self.deployment.advance():
                        self._ready()
                        return True
            with self.pulse.doing("R"):  # forward, backward and update are named inside
                return self.executor is not None and self.executor.advance()
        except UserError as error:
            self._fail(error.problem, error.hint)
        except ReplicasDisagree as error:
            self._fail(str(error), SDC_HINT)
        return False

    def _guarded(self, control: ToWorker) -> None:
        try:
            with self.pulse.doing(type(control).__name__, units=0):
                self._handle(control)
        except UserError as error:
            self._fail(error.problem, error.hint)

    def _handle(self, control: ToWorker) -> None:
        match control:
            case Measure():
                self._measure(control)
            case Deploy():
                self._deploy(control)
            case Resume():
                self._resume(control)
            case Report():
                self._report(control)
            case Decide():
                self._decide(control)
            case Flag():
                self._flag(control)
            case Release():
                if control.job == self.job_id:
                    self._release()
            case Inject():
                self._inject(control)
            case Welcome() | Refused() | Ack():
                pass  # the agent's business
            case _:
                assert_never(control)

    def _inject(self, message: Inject) -> None:
        if message.how == "net-drop":
            self.transport.block(message.seconds)
        elif message.how == "hang" and not message.at and self.executor is None:
            self.pulse.wait()
            hang_for_ever()
        else:
            self.faults.arm(message.at or ANYWHERE, message.round, hang=message.how == "hang")

    def _measure(self, message: Measure) -> None:
        spec = load_spec(message.spec)
        open_corpus(message.spec)  # a job without text fails before it is planned
        profile = measure(spec, message.spec, self.torch_device)
        self.tell(Measured(self.place.device, message.job, profile))

    # ------------------------------------------------------------------ layouts

    def _deploy(self, message: Deploy) -> None:
        if self.executor is not None and message.epoch <= self.executor.commit.answered:
            return
        if message.job != self.job_id:
            self._release()
        executor = self.executor or self._begin_job(message.job, message.spec)
        self.faults.reach("deploy", message.counters.round)
        self.transport.configure(message.peers, bytes.fromhex(message.secret))
        self.plane.enter(message.epoch, message.layout.holdings)
        self.deployment = Deployment(message, executor.store, self.post, self.faults)
        self.deployment.start()
        if self.deployment.advance():
            self._ready()

    def _begin_job(self, job_id: str, job: Job) -> Executor:
        self.job_id = job_id
        store = Store(load_spec(job), self.torch_device)
        self.executor = Executor(
            self.place.device, job_id, job, store, open_corpus(job), self.post, self.faults, self.tell,
            self.pulse, self.turn.aside, Beside(self.tell, self.faults, self.mailbox.wake),
        )  # fmt: skip
        return self.executor

    def _ready(self) -> None:
        assert self.deployment is not None
        message = self.deployment.message
        self.tell(Ready(self.place.device, message.epoch, self.deployment.copied_bytes))
        self.faults.reach("ready", message.counters.round)

    def _adopt(self, layout_epoch: int) -> None:
        """Bring the prepared layout into force if it is ``layout_epoch``'s, drop it otherwise."""
        deployment, self.deployment = self.deployment, None
        if deployment is None or self.executor is None:
            return
        self.post.purge(lambda key: key[0] == "T" and int(key[1]) <= deployment.message.epoch)
        if deployment.message.epoch != layout_epoch:
            return
        self.executor.store.adopt(deployment.layers, deployment.incoming)
        gone = self.transport.peers() - deployment.message.layout.holdings.keys()
        self._forget(gone)
        if deployment.layers is None:
            self._release(abandon=False)  # its share of a checkpoint is wanted as before
        else:
            message = deployment.message
            self.executor.adopt(message.layout, message.counters, order_of(message.ops))

    def _resume(self, message: Resume) -> None:
        if self.deployment is not None and self.deployment.message.epoch == message.layout:
            self._adopt(message.layout)
        executor = self.executor
        if executor is not None and executor.layout.epoch == message.layout and not executor.commit.frozen:
            executor.resume()

    def _report(self, message: Report) -> None:
        if self.deployment is not None and message.epoch > self.deployment.message.epoch:
            self._adopt(message.layout)
        self._forget(message.dead)
        if self.executor is not None and self.executor.layout.epoch == message.layout:
            self.executor.report(message.epoch, message.dead)

    def _decide(self, message: Decide) -> None:
        if self.executor is not None:
            self.executor.decide(message)

    def _flag(self, message: Flag) -> None:
        executor = self.executor
        if executor is None or message.epoch < executor.commit.answered:
            return
        known = message.round >= executor.checkpointed  # else one was begun since this was said
        executor.flags |= Flags(message.flags.hold, message.flags.checkpoint and known)

    def _release(self, *, abandon: bool = True) -> None:
        if self.executor is not None and abandon:
            self.executor.writer.abandon()
        self.executor, self.deployment, self.job_id = None, None, ""
        self.post.purge(lambda _: True)
        self.plane.leave()
        self._forget(self.transport.peers())
        give_back_memory()

    def _forget(self, peers: Collection[str]) -> None:
        self.plane.forget(peers)
        self.transport.forget(peers)

    # ------------------------------------------------------------------ to the agent

    def tell(self, message: FromWorker) -> None:
        """Send a message to the daemon, by way of the agent."""
        self.link.send(message)

    def _fail(self, problem: str, hint: str) -> None:
        self.tell(DeviceFailed(self.place.device, self.job_id, problem, hint))
        self._release()

    def _send(self, peer: str, key: Key, tensors: Sequence[Tensor], meta: bytes) -> bool:
        return self.transport.send(peer, key, tensors, meta)

    def _peer_lost(self, peer: str, why: str) -> None:
        self.link.send(LinkDown(self.place.device, peer, why))

    def _tell_up(self) -> None:
        """Where this device stands, for the agent's Hello."""
        executor = self.executor
        counters = executor.counters if executor else Counters()
        info = DeviceInfo(
            device=self.place.device,
            kind=self.place.kind,
            name=device_model(self.torch_device),
            memory_bytes=device_memory_bytes(self.torch_device),
            address=self.transport.address,
            local=self.transport.local,
            pid=os.getpid(),
            job=self.job_id,
            layout=executor.layout.epoch if executor else 0,
            epoch=executor.commit.answered if executor else 0,
            step=counters.step,
            round=counters.round,
            holding=executor is not None and executor.holding,
        )
        self.link.send(DeviceUp(info))


def give_back_memory() -> None:
    """Have the C library return to the system what it keeps for allocations to come (``children``)."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
        trim(0)


def torch_device(place: Place) -> torch.device:
    """The torch device of this process, set up so that its results repeat bit for bit."""
    if place.kind != "cuda":
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    index = int(place.device.rpartition("/")[2]) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def device_model(device: torch.device) -> str:
    """Human name of the device, such as "NVIDIA H200" or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def device_memory_bytes(device: torch.device) -> int:
    """Memory of the device in bytes; for the CPU that of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
