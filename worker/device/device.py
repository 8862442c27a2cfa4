"""The device process: one per device, owns torch, lives through every reconfiguration.

Owns the loop (controls, then the deployment under way, then the executor, then what is pre-copied for a
plan), what a control message does, and the answer to a report in the middle of a task. Started by the agent
(``process``); ends with it. Training itself is in ``executor``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import assert_never

import msgspec
import torch
from torch import Tensor

from oobleckd.host import urgency
from oobleckd.protocol.deaths import OUT_OF_MEMORY
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import (
    Ack,
    ArtifactHere,
    ArtifactKept,
    ArtifactPart,
    ArtifactTaken,
    Decide,
    Deploy,
    DeviceFailed,
    DeviceUp,
    Dismiss,
    Emptied,
    EndStopped,
    Flag,
    FromWorker,
    Identified,
    Identify,
    Inject,
    LastWords,
    LinkDown,
    Measure,
    Measured,
    Message,
    PreCopied,
    PreCopy,
    PrepareData,
    Ready,
    Refused,
    Release,
    Report,
    Resume,
    StopPreparing,
    TellLog,
    ToWorker,
    Wake,
    Welcome,
)
from oobleckd.protocol.parts import Counters, DeviceInfo, Flags, How
from oobleckd.worker.artifacts.asking import Asking
from oobleckd.worker.canary.canary import Canary, kinds
from oobleckd.worker.checkpointing.writer import BackgroundWriter
from oobleckd.worker.data.rows import Misread
from oobleckd.worker.device.agent_link import DeviceLink
from oobleckd.worker.device.compiling import Compiling
from oobleckd.worker.device.context import (
    DeviceContext,
    arithmetic,
    card_of,
    device_memory_bytes,
    device_model,
    give_back_memory,
    torch_device,
)
from oobleckd.worker.device.executor import Executor
from oobleckd.worker.device.flip import flip
from oobleckd.worker.device.measure import bind, measure
from oobleckd.worker.device.reading import Reading, Unread
from oobleckd.worker.device.traits import traits
from oobleckd.worker.groups.choose import choose
from oobleckd.worker.groups.manager import GroupManager
from oobleckd.worker.models import Layer, ModelSpec, load_spec
from oobleckd.worker.reconfigure.deploy import KINDS, Deployment, expected, outgoing
from oobleckd.worker.reconfigure.precopy_source import PreCopySource
from oobleckd.worker.reconfigure.precopy_target import PreCopyTarget, is_of
from oobleckd.worker.round.gather import Intake
from oobleckd.worker.round.messenger import TransportMessenger
from oobleckd.worker.round_machine.commit import ReplicasDisagree
from oobleckd.worker.round_machine.tasks import order_of
from oobleckd.worker.runtime.activity import LOOK_UP_S, ActivityPage, phase_of
from oobleckd.worker.runtime.deaths import death_in_full
from oobleckd.worker.runtime.errors import UserError, at_the_end, ends_the_process
from oobleckd.worker.runtime.faults import ANYWHERE, Faults, hang_for_ever
from oobleckd.worker.runtime.host_memory import most_of
from oobleckd.worker.runtime.yielding_lock import YieldingLock
from oobleckd.worker.state.bucket_files import DamagedCheckpoint
from oobleckd.worker.state.store import Store
from oobleckd.worker.sums.guard import SumsChanged
from oobleckd.worker.transport.mailbox import Key, Mailbox
from oobleckd.worker.transport.transport import Transport

_log = logging.getLogger(__name__)


class DeviceProcess:
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

    def _copy(self, deployment: Deployment) -> bool:
        """Go on with the deployment under way; whether there was anything to do."""
        with self.activity.doing("copy", units=0):
            awaited = bool(deployment.awaited)
            worked = deployment.advance()
        if awaited and not deployment.awaited:
            self._ready()
        return worked

    def _stage(self) -> bool:
        """While there is nothing else to do: make an update of what was pre-copied; False when nothing is to
        be done there either.
        """
        precopy_target = self.precopy_target
        if precopy_target is None or self.deployment is not None:
            return False
        # Replayed while there is nothing else to do, in this thread: a step's update made once more takes
        # less than waiting for votes, and a thread of its own would compute beside training.
        # (D-precopy-004)
        with self.activity.doing("stage", units=0):
            worked = precopy_target.advance()
        if worked:
            self.faults.reach("stage", precopy_target.round)
        if not (worked or precopy_target.told) and precopy_target.caught_up:
            precopy_target.told = True
            self.tell(PreCopied(self.context.device, precopy_target.number, precopy_target.round))
        return worked

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

    def _compile(self, spec: ModelSpec, layers: Sequence[int], bind: Callable[[int], Layer]) -> None:
        """Compile those of ``layers`` that are not yet. Nothing is answered meanwhile."""
        # In this thread: the generator that dropout draws from is one for all threads, and training may go on
        # beside a deployment that is given up. (D-compile-007)
        missing = self.compiling.missing(spec.job, layers)
        if not missing:
            return
        with self.activity.doing("compile", units=0):
            self.compiling.begin()
            self.compiling.run(spec, missing, bind)

    # ------------------------------------------------------------------ layouts

    def _deploy(self, message: Deploy) -> None:
        if self.executor is not None and message.epoch <= self.executor.machine.answered:
            return
        if message.job != self.job_id:
            self._release()
        executor = self.executor or self._begin_job(message.job, message.spec)
        self.faults.reach("deploy", message.counters.round)
        # A plan of which nothing came leaves links at both ends; a goodbye that came late would be taken
        # for this plan's, whose copies were then dropped for ever. (D-transport-008)
        anew = frozenset() if message.precopied else self._strangers(message.peers)
        self.transport.configure(message.peers, bytes.fromhex(message.secret), anew)
        self.groups.enter(message.epoch, message.layout.holdings)
        self._drop_before(message.precopied or sys.maxsize)
        self.deployment = Deployment(
            message, executor.store, self.messenger, self.faults, executor.precopy_source, self.precopy_target
        )
        self.deployment.start()
        if not self.deployment.awaited:
            self._ready()

    def _precopy(self, message: PreCopy) -> None:
        """Pre-copy, from now on; or no more."""
        if self.deployment is not None:
            if self.executor is not None and self.executor.layout.epoch:
                return
            self._adopt(0)  # one that was given up, of which a device without a layout hears nothing else
        self._drop_before(message.number if message.transfers else message.number + 1)
        # An empty PreCopy ends one, and not Release: that closes links and drops what copies of a
        # deployment that follows at once have brought already. (D-precopy-007)
        if not message.transfers:
            # The job stays, empty: to begin it once more would drop a deployment's tensor messages.
            return
        if message.job != self.job_id:
            self._release()
        executor = self.executor or self._begin_job(message.job, message.spec)
        self.transport.configure(message.peers, bytes.fromhex(message.secret), self._strangers(message.peers))
        store, device = executor.store, self.context.device
        targets = outgoing(store, message.transfers, device)
        if targets:
            executor.begin_precopy(
                PreCopySource(message.number, device, self.messenger, targets, message.rounds)
            )
        sources = expected(store, message.transfers, device)
        missing = {bucket: source for bucket, source in sources.items() if bucket not in store.buckets}
        if sources:
            self.precopy_target = PreCopyTarget(message.number, executor.job, store, self.messenger, missing)

    def _strangers(self, peers: Collection[str]) -> frozenset[str]:
        """Those of ``peers`` who are not in a layout with this device. Links to them may be left of a plan of
        which nothing came, and either end may yet have to hear of that, so they are made anew; but for a plan
        that follows its own pre-copy.
        """
        executor = self.executor
        return frozenset(peers) - (executor.layout.holdings.keys() if executor is not None else frozenset())

    def _drop_before(self, number: int) -> None:
        """Forget pre-copies before ``number``."""
        if (
            self.executor is not None
            and self.executor.precopy_source is not None
            and self.executor.precopy_source.number < number
        ):
            self.executor.end_precopy()
        if self.precopy_target is not None and self.precopy_target.number < number:
            self.precopy_target = None
        self.messenger.purge(lambda key: is_of(key, number - 1))

    def _begin_job(self, job_id: str, job: Job) -> Executor:
        self.job_id = job_id
        corpus = self.reading.corpus(job_id, job)
        spec = load_spec(job)
        if job.train.compile:
            # All kinds, not only those that it is to hold: the canary computes each, and layers that it takes
            # over after a loss are loaded then. (D-compile-012)
            layers = [layer for layer in kinds(spec) if layer]
            self._compile(spec, layers, partial(bind, spec, device=self.torch_device))
        self.canary.sing(spec, traits(self.torch_device))
        give_back_memory()  # of a layer's canary, before there is a state to hold
        self._tell_up()  # before others hear of it: what the agent says in a Hello counts
        self.tell(Identified(self.context.device, job_id, self.reading.inputs, canary=self.canary.said))
        store = Store(spec, self.torch_device)
        self.executor = Executor(
            self.context.device, job_id, job, store, corpus, self.messenger, self.faults, self.tell,
            self.activity, self.lock.released, BackgroundWriter(self.tell, self.faults, self.mailbox.wake),
            self.reading.check,
        )  # fmt: skip
        return self.executor

    def _ready(self) -> None:
        assert self.deployment is not None
        message = self.deployment.message
        if message.spec.train.compile and self.deployment.layers is not None:
            held = self.deployment.layers.layers()
            self._compile(self.deployment.store.spec, held, self.deployment.bound)
        if message.source != "copy":
            # 146 MiB where 90 were needed with width 256: what making weights took stayed in the heap for
            # the whole job. (D-devices-013)
            give_back_memory()  # what making weights, or reading them, took
        copied_bytes, staged_bytes = self.deployment.copied_bytes, self.deployment.staged_bytes
        notes = self.deployment.store.spec.notes
        device, inputs = self.context.device, self.reading.inputs
        self.tell(Ready(device, message.epoch, copied_bytes, staged_bytes, notes, inputs, self.canary.said))
        self.faults.reach("ready", message.counters.round)

    def _adopt(self, layout_epoch: int) -> None:
        """Bring the prepared layout into force if it is ``layout_epoch``'s, drop it otherwise."""
        deployment, self.deployment = self.deployment, None
        if deployment is None or self.executor is None:
            return
        self._drop_before(sys.maxsize)
        self.messenger.purge(lambda key: key[0] in KINDS and int(key[1]) <= deployment.message.epoch)
        if deployment.message.epoch != layout_epoch:
            return
        self.executor.store.adopt(deployment.layers, deployment.incoming)
        gone = self.transport.peers() - deployment.message.layout.holdings.keys()
        self._forget(gone)
        if deployment.layers is None:
            self.reading.leave(self.executor.counters)
            self._release(abandon=False)  # its share of a checkpoint is wanted as before
        else:
            message = deployment.message
            self.executor.sample_every, self.executor.check.recheck = message.sample_every, message.recheck
            self.executor.compare_every(message.spec.fault_tolerance.check_every)  # others may be there now
            self.executor.saving.folder, self.executor.saving.journal = message.folder, message.journal
            self.executor.saving.only_evaluates = message.only_evaluates
            self.executor.adopt(message.layout, message.counters, order_of(message.ops))

    def _resume(self, message: Resume) -> None:
        if self.deployment is not None and self.deployment.message.epoch == message.layout:
            self._adopt(message.layout)
        executor = self.executor
        if executor is None or executor.layout.epoch != message.layout or executor.machine.frozen:
            return
        # The round makes a Resume that is said twice harmless, so the daemon may repeat it whenever a
        # connection may have taken one along. (D-recovery-024)
        if message.round in {-1, executor.counters.round}:
            executor.resume()

    def _report(self, message: Report) -> None:
        if self.deployment is not None and message.epoch > self.deployment.message.epoch:
            self._adopt(message.layout)
        self._forget(message.dead)
        if self.executor is not None and self.executor.layout.epoch == message.layout:
            self.executor.report(message.epoch, message.dead)
            self.reading.tell_again()

    def _decide(self, message: Decide) -> None:
        if self.executor is not None:
            self.executor.decide(message)

    def _flag(self, message: Flag) -> None:
        executor = self.executor
        if executor is None or message.epoch < executor.machine.answered:
            return
        known = message.round >= executor.saving.begun  # else one was begun since this was said
        executor.machine.flag(
            Flags(message.flags.hold, message.flags.checkpoint and known, full=message.flags.full)
        )

    def _release_of(self, message: Release) -> None:
        if message.job == self.job_id:
            if self.executor is not None:
                self.reading.leave(self.executor.counters)
            self._release()
        # Said, and waited for: a slow node got to an old Release when the next plan's copies had come, and
        # dropped them; all waited for it for ever. (D-recovery-023)
        self.tell(Emptied(self.context.device, message.order))

    def _release(self, *, abandon: bool = True) -> None:
        if self.executor is not None and abandon:
            self.executor.saving.writer.abandon()
        self.executor, self.deployment, self.precopy_target, self.job_id = None, None, None, ""
        self.reading.rest()
        self.messenger.gather(None)
        self.messenger.purge(lambda _: True)
        self.groups.leave()
        self._forget(self.transport.peers())
        give_back_memory()

    def _forget(self, peers: Collection[str]) -> None:
        self.groups.forget(peers)
        self.transport.forget(peers)

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
