"""The device process: one per device, owns torch, lives through every reconfiguration.

Owns the loop (controls, then the deployment under way, then the executor, then what is pre-copied for a
plan), and the answer to a report in the middle of a task. Started by the agent (``process``); ends with it.
What messages about layouts do is in ``layouts``, training itself in ``training.executor``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import assert_never

import msgspec
import torch
from torch import Tensor

from oobleckd.host import urgency
from oobleckd.protocol.agentmessages import (
    Ack,
    Dismiss,
    EndStopped,
    Inject,
    Refused,
    TellLog,
    Wake,
    Welcome,
)
from oobleckd.protocol.artifactmessages import ArtifactHere, ArtifactKept, ArtifactPart, ArtifactTaken
from oobleckd.protocol.datamessages import Identify, PrepareData, StopPreparing
from oobleckd.protocol.deaths import OUT_OF_MEMORY
from oobleckd.protocol.message import Message
from oobleckd.protocol.messages import (
    Decide,
    Deploy,
    DeviceFailed,
    Flag,
    FromWorker,
    LinkDown,
    Measure,
    Measured,
    PreCopy,
    Release,
    Report,
    Resume,
    ToWorker,
)
from oobleckd.protocol.nodemessages import DeviceUp, LastWords
from oobleckd.protocol.parts import Counters, DeviceInfo, How
from oobleckd.worker.artifacts.asking import Asking
from oobleckd.worker.canary.canary import Canary
from oobleckd.worker.data.rows import Misread
from oobleckd.worker.device.agent_link import DeviceLink
from oobleckd.worker.device.compiling import Compiling
from oobleckd.worker.device.context import (
    DeviceContext,
    arithmetic,
    card_of,
    device_memory_bytes,
    device_model,
    torch_device,
)
from oobleckd.worker.device.flip import flip
from oobleckd.worker.device.layouts import JobHolder
from oobleckd.worker.device.measure import bind, measure
from oobleckd.worker.device.reading import Reading, Unread
from oobleckd.worker.device.traits import traits
from oobleckd.worker.groups.choose import choose
from oobleckd.worker.groups.manager import GroupManager
from oobleckd.worker.messaging.gather import Intake
from oobleckd.worker.messaging.messenger import TransportMessenger
from oobleckd.worker.models import load_spec
from oobleckd.worker.reconfigure.deploy import Deployment
from oobleckd.worker.reconfigure.precopy_target import PreCopyTarget
from oobleckd.worker.round_machine.commit import ReplicasDisagree
from oobleckd.worker.runtime.activity import LOOK_UP_S, ActivityPage, phase_of
from oobleckd.worker.runtime.deaths import death_in_full
from oobleckd.worker.runtime.errors import UserError, at_the_end, ends_the_process
from oobleckd.worker.runtime.faults import ANYWHERE, Faults, hang_for_ever
from oobleckd.worker.runtime.host_memory import most_of
from oobleckd.worker.runtime.yielding_lock import YieldingLock
from oobleckd.worker.state.bucket_files import DamagedCheckpoint
from oobleckd.worker.sums.guard import SumsChanged
from oobleckd.worker.training.executor import Executor
from oobleckd.worker.transport.mailbox import Key, Mailbox
from oobleckd.worker.transport.transport import Transport

_log = logging.getLogger(__name__)


class DeviceProcess(JobHolder):
    """Controls in, training state and answers out. ``compiling``: what this process has compiled, or loaded,
    as a spare.
    """

    def __init__(
        self,
        context: DeviceContext,
        fd: int,
        activity: ActivityPage,
        compiling: Compiling | None = None,
    ) -> None:
        self.context, self.activity = context, activity
        self.executor: Executor | None = None
        self.deployment: Deployment | None = None
        self.precopy_target: PreCopyTarget | None = None
        self.job_id = ""
        self.mailbox, self.lock = Mailbox(), YieldingLock()
        self._loop = threading.get_native_id()  # of the thread that makes this, and runs it
        self.torch_device = torch_device(context)
        self.canary = Canary(context.device, self.torch_device, context.before)
        backend, why = choose(self.torch_device)
        _log.info("%s: messages take %s", context.device, why)
        self.asking = Asking(self._ask_agent)
        self.link = DeviceLink(
            fd,
            self.mailbox,
            on_control=self._answer_at_once,
            on_artifact=self.asking.heard,
            urgent=context.urgent,
        )
        at_the_end(self.last_words)
        self.groups = GroupManager(context.device, self.mailbox, backend, self._send)
        intake = Intake(self.groups)
        self.transport = Transport(
            context.device,
            context.host,
            intake,
            bind=context.bind,
            local_dir=context.run_dir,
            on_peer_lost=self._peer_lost,
            room=intake.room,
        )
        self.messenger = TransportMessenger(
            self.transport, self.groups, intake, self.mailbox, self.torch_device
        )
        self.faults = Faults(context.device, context.run_dir)
        self.flips: list[How] = []
        self.reading = Reading(context.device, self.tell, self.mailbox.wake)
        self.compiling = compiling or Compiling(context.compiled_path, self.torch_device)
        self.compiling.who, self.compiling.asking = context.device, self.asking
        self._idle_bytes = 0  # of the host's memory, without a job

    def run(self) -> None:
        """Serve until the agent ends this process."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._idle_bytes = most_of("self")
        self._tell_up()
        while True:
            with self.lock:
                worked = self._turn()
            while not worked and not self.mailbox.wait(LOOK_UP_S):
                with self.lock:
                    self.activity.wait()

    def _turn(self) -> bool:
        """Heed what is said, then do one piece of work; False when there was none."""
        controls = self.mailbox.controls()
        for control in controls:
            self._guarded(control)
        if controls:
            self._tell_up()
        worked = self._work()
        if not worked:
            self.activity.wait()
        return worked

    def _answer_at_once(self) -> None:
        """Called by the link, in its thread, for every message. For a report the agent lent the loop its
        haste, so that it soon gives away what this thread waits for: Python's own lock, and ours.
        """
        if isinstance(self.mailbox.next_control(), Report):
            with ends_the_process("report"), self.lock:
                self._answer()
        # The loop holds Python's lock, and with more devices than cores it was often not running: 5 to 10
        # ms from a notice to the decision, 3 to 4 with the haste that the agent lends it. (D-recovery-021)
        urgency.take_back(self._loop)

    def _answer(self) -> None:
        """Answer a report while a layer computes. Not where the answer changes weights or layers, with which
        it computes: then the loop does it.
        """
        # To wait for the running task's end was most of the time from a loss to the decision, 60 to 85 ms;
        # with a look between layers it is 20 to 26. Nothing is half done while a layer computes.
        # (D-recovery-013)
        busy = self.deployment is not None or (self.executor is not None and self.executor.early is not None)
        if not busy and isinstance(report := self.mailbox.next_control(), Report):
            self.mailbox.remove_control(report)
            self._guarded(report)
            self._tell_up()

    def _work(self) -> bool:
        """One piece of work; False when there is none."""
        self._flip()
        self._look_at_inputs()
        try:
            if self.deployment is not None and self.deployment.at_work and self._copy(self.deployment):
                return True
            with self.activity.doing("R"):  # forward, backward and update are named inside
                if self.executor is not None and self._advance(self.executor):
                    return True
            return self._stage()
        except Misread as error:
            self._misread(error)
        except UserError as error:
            self._fail(error)
        except (ReplicasDisagree, SumsChanged) as error:
            self._distrust(error)
        return False

    def _advance(self, executor: Executor) -> bool:
        was_holding = executor.holding
        worked = executor.advance()
        if executor.holding != was_holding:
            self._tell_up()  # whether a Resume was missed shows in the agent's next Hello
        return worked

    def _look_at_inputs(self) -> None:
        """Take in what the watch of what the job reads has found. Where that has changed the device goes no
        further; the daemon will say what to do.
        """
        executor = self.executor
        if self.reading.hear(executor.counters if executor is not None else None) and executor is not None:
            executor.misread = True
            self._tell_up()

    def _misread(self, error: Misread) -> None:
        """The device goes no further; the daemon will say what to do."""
        assert self.executor is not None, "who trains nothing reads no samples"
        self.reading.misread(error.problem, self.executor.counters)
        self.executor.misread = True
        self._tell_up()

    def _flip(self) -> None:
        """Bits that were to flip, once there is something to flip."""
        if self.flips and self.executor is not None:
            reducer = self.executor.reducer
            self.flips = [how for how in self.flips if not flip(how, reducer)]

    def _guarded(self, control: ToWorker) -> None:
        try:
            with self.activity.doing(type(control).__name__, units=0):
                self._handle(control)
        except UserError as error:
            self._fail(error)
        except (ReplicasDisagree, SumsChanged) as error:
            self._distrust(error)

    def _distrust(self, error: ReplicasDisagree | SumsChanged) -> None:
        """Bits are wrong; the daemon will say what to do."""
        assert self.executor is not None, "who trains nothing compares nothing"
        self.executor.distrust(error)
        self._tell_up()

    def _handle(self, control: ToWorker) -> None:
        match control:
            case Measure():
                self._measure(control)
            case Identify():
                self.reading.identify(control, reads=self.executor is not None)
            case PreCopy():
                self._precopy(control)
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
                self._release_of(control)
            case Inject():
                self._inject(control)
            case (
                Welcome()
                | Refused()
                | Dismiss()
                | Ack()
                | EndStopped()
                | Wake()
                | TellLog()
                | PrepareData()
                | StopPreparing()
                | ArtifactHere()
                | ArtifactKept()
                | ArtifactPart()
                | ArtifactTaken()
            ):
                pass  # the agent's business
            case _:
                assert_never(control)

    def _inject(self, message: Inject) -> None:
        if message.how == "net-drop":
            self.transport.block(message.seconds)
        elif message.how.startswith("flip-"):
            self.flips.append(message.how)
        elif message.how == "slow":
            self.faults.slow_down(message.times, message.seconds)
        elif message.how == "hang" and not message.at and self.executor is None:
            self.activity.wait()
            hang_for_ever()
        else:
            self.faults.arm(message.at or ANYWHERE, message.round, hang=message.how == "hang")

    def _measure(self, message: Measure) -> None:
        spec = load_spec(message.spec)
        self.reading.corpus(message.job, message.spec)  # a job without text fails before it is planned
        if message.spec.train.compile:
            self._compile(spec, range(spec.num_layers), partial(bind, spec, device=self.torch_device))
        profile = measure(spec, message.spec, self.torch_device)
        self.tell(Measured(self.context.device, message.job, profile, self.reading.inputs))

    # ------------------------------------------------------------------ to the agent

    def tell(self, message: FromWorker) -> None:
        """Send a message to the daemon, by way of the agent."""
        self.link.send(message)

    def _ask_agent(self, message: Message) -> None:
        self.link.send(message)

    def _fail(self, error: UserError) -> None:
        told = self.deployment.message if self.deployment is not None else None
        damaged = told.source if told is not None and isinstance(error, DamagedCheckpoint) else ""
        device, unread = self.context.device, isinstance(error, Unread)
        failed = DeviceFailed(device, self.job_id, error.problem, error.hint, damaged, error.cause)
        self.tell(msgspec.structs.replace(failed, unread=unread))
        self._release()

    def last_words(self, error: Exception, phase: str) -> bool:
        """Tell the agent why this process ends; whether it does for want of memory, which is
        nobody's error.
        """
        executor, deployment = self.executor, self.deployment
        heard = executor.machine.answered if executor is not None else 0
        epoch = max(heard, deployment.message.epoch if deployment is not None else 0)
        phase = phase or phase_of(self.activity.failed_in(error))
        death = death_in_full(error, phase, self.job_id, epoch, self.torch_device, self._idle_bytes)
        if death is not None:
            self.link.send_last(LastWords(death))
        return death is not None and death.kind == OUT_OF_MEMORY

    def _send(self, peer: str, key: Key, tensors: Sequence[Tensor], meta: bytes) -> bool:
        return self.transport.send(peer, key, tensors, meta)

    def _peer_lost(self, peer: str, why: str) -> None:
        executor = self.executor
        if executor is not None and executor.precopy_source is not None:
            executor.precopy_source.broken.add(peer)
        self.tell(LinkDown(self.context.device, peer, why))

    def _tell_up(self) -> None:
        """Where this device stands, for the agent's Hello."""
        executor = self.executor
        counters = executor.counters if executor else Counters()
        info = DeviceInfo(
            device=self.context.device,
            kind=self.context.kind,
            name=device_model(self.torch_device),
            memory_bytes=device_memory_bytes(self.torch_device),
            address=self.transport.address,
            local=self.transport.local,
            pid=os.getpid(),
            job=self.job_id,
            layout=executor.layout.epoch if executor else 0,
            epoch=executor.machine.answered if executor else 0,
            step=counters.step,
            round=counters.round,
            holding=executor is not None and (executor.holding or executor.misread),
            arithmetic=arithmetic(self.torch_device),
            traits=self.canary.traits(traits(self.torch_device)),
            card=card_of(self.torch_device),
        )
        self.link.send(DeviceUp(info))
