"""What a device has of a job: its executor, the layout that it gets ready for, what is pre-copied.

Owns what a message about layouts does to them, and what is left of a job when it goes. When one is heeded,
and what a failure there comes to, is the device process's (``device``).
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from oobleckd.planner.plan import shard_rank
from oobleckd.protocol.datamessages import Identified
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import (
    Decide,
    Deploy,
    Emptied,
    Flag,
    FromWorker,
    PreCopied,
    PreCopy,
    Ready,
    Release,
    Report,
    Resume,
)
from oobleckd.protocol.parts import Flags
from oobleckd.worker.canary.canary import Canary, kinds
from oobleckd.worker.checkpointing.writer import BackgroundWriter
from oobleckd.worker.device.compiling import Compiling
from oobleckd.worker.device.context import (
    DeviceContext,
    give_back_memory,
)
from oobleckd.worker.device.measure import bind
from oobleckd.worker.device.reading import Reading, Unread
from oobleckd.worker.device.traits import traits
from oobleckd.worker.groups.manager import GroupManager
from oobleckd.worker.messaging.messenger import TransportMessenger
from oobleckd.worker.models import Layer, ModelSpec, load_spec
from oobleckd.worker.reconfigure.deploy import KINDS, Deployment, expected, outgoing
from oobleckd.worker.reconfigure.precopy_source import PreCopySource
from oobleckd.worker.reconfigure.precopy_target import PreCopyTarget, is_of
from oobleckd.worker.round_machine.tasks import order_of
from oobleckd.worker.runtime.activity import ActivityPage
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.runtime.faults import Faults
from oobleckd.worker.runtime.yielding_lock import YieldingLock
from oobleckd.worker.state.store import Store
from oobleckd.worker.training.executor import Executor
from oobleckd.worker.transport.mailbox import Mailbox
from oobleckd.worker.transport.transport import Transport

_log = logging.getLogger(__name__)


class JobHolder(ABC):
    """Has nothing until the first message of a job. Whoever is one sets what is named here, and says where it
    stands (``_tell_up``).
    """

    context: DeviceContext
    activity: ActivityPage
    torch_device: torch.device
    mailbox: Mailbox
    lock: YieldingLock
    canary: Canary
    groups: GroupManager
    transport: Transport
    messenger: TransportMessenger
    faults: Faults
    reading: Reading
    compiling: Compiling
    executor: Executor | None
    deployment: Deployment | None
    precopy_target: PreCopyTarget | None
    job_id: str

    @abstractmethod
    def tell(self, message: FromWorker) -> None:
        """Send a message to the daemon."""

    @abstractmethod
    def _tell_up(self) -> None:
        """Where this device stands, for the agent's Hello."""

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
        """Pre-copy, from now on; or no more; or preload."""
        if message.preload:
            self._preload(message.job, message.spec)
            return
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
        store.divide(message.devices_per_stage, shard_rank(device, message.devices_per_stage))
        targets = outgoing(store, message.transfers, device)
        if targets:
            executor.begin_precopy(
                PreCopySource(message.number, device, self.messenger, targets, message.rounds)
            )
        sources = expected(store, message.transfers, device)
        missing = {bucket: source for bucket, source in sources.items() if bucket not in store.buckets}
        if sources:
            self.precopy_target = PreCopyTarget(message.number, executor.job, store, self.messenger, missing)

    def _preload(self, job_id: str, job: Job) -> None:
        """Load what a ``Deploy`` of the job needs before its copies. Raises Unread: then the node is kept out
        of the plan.
        """
        if self.deployment is not None or self.executor is not None:
            return
        try:
            self._begin_job(job_id, job)
        except Unread:
            raise
        except UserError as error:
            # A Deploy would end the job with it; until there is one the job does without this device.
            # (D-precopy-016)
            _log.warning("%s cannot load %s: %s", self.context.device, job_id, error.problem)
            self._release()

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
        deployment.adopt()
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
