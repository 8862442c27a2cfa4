"""The daemon's parts put together: journal, core, hub, planner, history, loop, in the order in which they
live.

Owns start, stop and reload. Stopping tells nobody anything: workers go on training, keep what they have
to say, and say it to the next incarnation of the daemon.

Errors: JournalError, CopiedState, KeyFileError, TokenError, HubError, TracesMissing, each with ``hint``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path

import msgspec

from oobleckd import __version__
from oobleckd.core import config as core_config
from oobleckd.core import snapshot, steps, view
from oobleckd.core.context import Core
from oobleckd.core.entries import AnyEntry, Evaluated, RecordsLost, StepEntry
from oobleckd.core.evaluations import mean_loss
from oobleckd.core.events import FolderFound, Tick
from oobleckd.core.machine import Machine
from oobleckd.core.state import JobRecord
from oobleckd.daemon import keys, place
from oobleckd.daemon.artifacts import Artifacts
from oobleckd.daemon.callers import Callers
from oobleckd.daemon.clock import Clock
from oobleckd.daemon.config import Config
from oobleckd.daemon.folders import Folders, JobFolder
from oobleckd.daemon.history import History
from oobleckd.daemon.hub import Hub
from oobleckd.daemon.journal import Journal, StepRow
from oobleckd.daemon.loop import Loop
from oobleckd.daemon.mend import Damage
from oobleckd.daemon.nodelogs import NodeLogs
from oobleckd.daemon.past import PastStore
from oobleckd.daemon.planning import Planning
from oobleckd.daemon.recorder import Recorder
from oobleckd.daemon.sinking import Sinking, orders_of
from oobleckd.daemon.tokens import Token, load_tokens
from oobleckd.daemon.traces import Traces, open_traces
from oobleckd.daemon.verifying import Verifying
from oobleckd.host import sd
from oobleckd.protocol.agentmessages import LogTold
from oobleckd.protocol.api import Status
from oobleckd.protocol.artifactmessages import GetArtifact, NoArtifact, PutArtifact, WantArtifact
from oobleckd.protocol.changes import DaemonTrouble
from oobleckd.protocol.messages import FromWorker

SERVER_KEY = "oobleck.server.key_secret"
"""The credential that holds the daemon's key pair, where systemd keeps it."""
_LAST_WRITES_S = 2.0
_DAY_S = 86_400.0
_STEPS_AGAIN = 2000  # the newest of an earlier incarnation, for who listened to it
_round_of = msgspec.msgpack.Decoder(StepEntry | Evaluated).decode
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Service:
    """One incarnation of the daemon. Made by ``open_service``, on the event loop that it will live on.

    ``recorder``: of what is kept for replay, None where that is switched off. ``traces``: where a collector
    is named.
    """

    config: Config
    clock: Clock
    started_at: float
    journal: Journal
    machine: Machine
    history: History
    planning: Planning
    hub: Hub
    loop: Loop
    callers: Callers
    folders: Folders
    node_logs: NodeLogs
    artifacts: Artifacts
    sinking: Sinking
    recorder: Recorder | None = None
    traces: Traces | None = None
    running: asyncio.Task[None] | None = None
    looking: asyncio.Task[None] | None = None
    verifying: asyncio.Task[None] | None = None

    @property
    def core(self) -> Core:
        """The core's state, for views."""
        return self.machine.core

    def start(self) -> asyncio.Task[None]:
        """Listen to agents, and warm the planner beside it. The task ends with a fault of the core alone."""
        self.running = asyncio.create_task(self.loop.run(), name="loop")
        self.artifacts.start()
        self.hub.start(self._heard, self._lost)
        self.planning.warm()
        self.looking = asyncio.create_task(self._look_at_folders(), name="folders")
        verifying = Verifying(self.journal, self.kept_for_long_enough, self._damaged)
        self.verifying = asyncio.create_task(verifying.run(), name="verifying")
        self.sinking.look(job.spec for job in self.core.state.jobs.values())
        if self.recorder is not None:
            self.recorder.start()
        return self.running

    def _heard(self, node: str, message: FromWorker) -> None:
        if isinstance(message, LogTold):
            self.node_logs.heard(node, message)
        elif isinstance(message, WantArtifact | GetArtifact | PutArtifact | NoArtifact):
            self.artifacts.heard(node, message)
        else:
            self.loop.heard(node, message)

    def _lost(self, node: str) -> None:
        self.artifacts.lost(node)
        self.loop.lost(node)

    def reload(self, config: Config) -> None:
        """Take over what may change in an incarnation: allow-list, tokens and log level. Raises KeyFileError,
        TokenError.
        """
        self.callers.tokens = _tokens(config)
        if config.curve:
            self.hub.allow(keys.load_authorized(config.keys_path))
        logging.getLogger().setLevel(config.log_level.upper())
        fixed = [
            name
            for name in Config.__struct_fields__
            if name != "log_level" and getattr(config, name) != getattr(self.config, name)
        ]
        if fixed:
            _log.warning("%s changed, which takes effect at the next start", ", ".join(fixed))
        self.config = msgspec.structs.replace(self.config, log_level=config.log_level)

    async def _look_at_folders(self) -> None:
        """Beside everything else: a disk may be slow, or away."""
        for job in [job for job in self.core.state.jobs.values() if not job.final]:
            found = await asyncio.to_thread(self.look_at_folder, job, self.core.state.next_number)
            if found is not None:
                self.loop.feed(found)

    def look_at_folder(self, job: JobRecord, number: int) -> FolderFound | None:
        """Where the checkpoints of ``job`` go, as far as that can be known now; ``number``: the first that
        may be free.
        """
        root = Path(self.core.checkpoint_dir(job.spec))
        try:
            return self.folders.look(JobFolder(job.id, job.spec.name, root, job.folder), number)
        except OSError as error:
            _log.warning(
                "the checkpoint folder of %s is looked at when the next one is written: %s", job.id, error
            )
            return None

    def kept_for_long_enough(self) -> list[str]:
        """Jobs that are over, and whose steps are kept no longer."""
        kept_s = self.config.keep_steps_days * _DAY_S
        jobs = self.core.state.jobs.values()
        ended = {job.id: job.finished_at for job in jobs if job.final and job.finished_at is not None}
        return [job for job, at in ended.items() if kept_s and at < self.clock.now() - kept_s]

    def _damaged(self, damage: Damage, mended: bool) -> None:
        """What was found of the journal while the daemon works."""
        said = DaemonTrouble("journal-damaged", str(damage.aside or ""), damage.what, over=mended)
        rest = "is mended" if mended else "is mended from its copy when the daemon is restarted"
        text = f"the journal was damaged ({damage.what}) and {rest}: nothing that counts was lost"
        _log.warning("%s", text)
        self.history.notice(text, said, "warn")

    async def close(self) -> None:
        """End in order. What is under way is on disk or unacknowledged afterwards."""
        self.history.close()
        for task in (self.looking, self.verifying):
            if task is not None:
                task.cancel()
        self.loop.stop()
        if self.recorder is not None:
            await self.recorder.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        if self.running is not None:
            await asyncio.wait({self.running}, timeout=_LAST_WRITES_S)
        # On a failing disk the loop still waits for it: closing the journal ends that.
        await asyncio.to_thread(self.journal.close)
        if self.running is not None:
            await asyncio.wait({self.running})
        self.planning.close()
        self.hub.close()
        await self.artifacts.close()
        await asyncio.to_thread(self.sinking.close)


def open_service(config: Config, *, adopt: bool = False) -> Service:
    """Lock and read the journal, bind the endpoint, and stand where the last incarnation ended. ``adopt``:
    also where the state folder is a copy.
    """
    traces = open_traces(config.traces) if config.traces else None
    clock = Clock()
    history = History(config.history)
    if traces is not None:
        history.listeners.append(traces.listen)
    loop = asyncio.get_running_loop()

    def on_trouble(trouble: str) -> None:
        text = trouble or "the journal can be written again; nothing was lost"
        said = DaemonTrouble("journal", error=trouble, over=not trouble)
        loop.call_soon_threadsafe(history.notice, text, said, "error" if trouble else "info")

    journal = Journal(config.state_path, step_of=step_row, on_trouble=on_trouble, decode=snapshot.decode)
    try:
        adopted = place.check(journal, adopt=adopt)
        service = _assemble(config, clock, journal, history)
    except BaseException:
        journal.close()
        raise
    service.traces = traces
    if adopted:  # at once: no plan may name folders of the one that it is a copy of
        for job in [job for job in service.core.state.jobs.values() if not job.final]:
            found = service.look_at_folder(job, service.core.state.next_number)
            if found is not None:
                service.loop.feed(found)
    return service


def step_row(entry: msgspec.Struct) -> StepRow | None:
    """Columns of a committed round, None for any other entry."""
    if isinstance(entry, Evaluated):
        known = entry.counters
        return StepRow(entry.job, known.round, known.step, "evaluated", mean_loss(entry.sums))
    if not isinstance(entry, StepEntry):
        return None
    return StepRow(entry.job, entry.counters.round, entry.counters.step, entry.outcome, entry.loss)


def _assemble(config: Config, clock: Clock, journal: Journal, history: History) -> Service:
    start = journal.start(AnyEntry)
    pair, allowed = None, {}
    if config.curve:
        pair = keys.make_server_keys(config.keys_path, sd.credential(SERVER_KEY))
        allowed = keys.load_authorized(config.keys_path)
    secret = keys.job_secret(config.state_path)
    hub = Hub(config.endpoint, pair=pair, allowed=allowed, udp=config.udp, heartbeat_s=config.heartbeat_s)
    try:
        forgotten = journal.damage is not None and journal.damage.lost
        for_core = _for_core(config, hub.endpoint, secret, journal.names[0])
        machine = Machine.restore(
            start.entries, clock.now(), for_core, state=start.state, forgotten=forgotten
        )
    except BaseException:
        hub.close()
        raise
    # Steps are no part of the state's history, but who listens across a restart is to miss none.
    told = (steps.change_of(_round_of(data)) for data in journal.newest_steps(_STEPS_AGAIN))
    again = [change for change in told if change is not None]
    known = sorted([*view.changes(machine.core), *again], key=lambda change: change.seq)
    history.restore(known, machine.core.state.seq)
    if journal.damage is not None:
        aside = str(journal.damage.aside or "")
        mended = DaemonTrouble("journal-damaged", aside, journal.damage.what, over=not forgotten)
        history.notice(_of_damage(journal.damage), mended, "error" if forgotten else "warn")

    def on_trouble(text: str) -> None:
        _log.warning("%s", text)
        history.notice(text, DaemonTrouble("planner", error=text), "warn")

    planning = Planning(on_trouble=on_trouble)
    folders = Folders(journal.names)
    made = Loop(machine, journal, history, planning, hub.tell, clock, folders)
    _log.info("read %d records of %s; agents connect to %s", journal.num_read, journal.path, hub.endpoint)
    if journal.damage is not None and journal.damage.lost:
        kept = str(journal.damage.aside or "")
        # An entry of the journal, said for seven days: in this life of the daemon alone a restart would
        # hide it. (D-daemon-017)
        machine.core.record(RecordsLost(journal.damage.what, kept, clock.now()))
        made.feed(Tick())  # which has it written at once
    callers = Callers(config.group, _tokens(config))
    service = Service(
        config, clock, clock.now(), journal, machine, history, planning, hub, made, callers, folders,
        NodeLogs(hub.tell),
        Artifacts(config.state_path / "artifacts", config.artifacts_mb * 2**20, hub.tell),
        Sinking(orders_of(config)),
    )  # fmt: skip
    if config.replay_mb:
        service.recorder = _recorder(service)
    return service


def _tokens(config: Config) -> tuple[Token, ...]:
    """Those that the API on TCP knows; none are read where there is no such."""
    return load_tokens(config.keys_path) if config.api else ()


def _of_damage(damage: Damage) -> str:
    """What people are told of a journal that was mended."""
    lost = (
        "its end is lost, and jobs roll back to their last checkpoint" if damage.lost else "nothing was lost"
    )
    kept = f"; the damaged file is {damage.aside}" if damage.aside is not None else ""
    return f"the journal was damaged ({damage.what}) and is mended: {lost}{kept}"


def _recorder(service: Service) -> Recorder:
    config, loop = service.config, asyncio.get_running_loop()

    def on_trouble(trouble: str) -> None:
        text = trouble or "replay is recorded again"
        said = DaemonTrouble("replay", error=trouble, over=not trouble)
        loop.call_soon_threadsafe(service.history.notice, text, said, "warn" if trouble else "info")

    store = PastStore(config.state_path, config.replay_mb * 2**20, config.replay_h * 3600.0, on_trouble)
    made = Recorder(store, service.core, lambda: status_of(service), service.clock.now)
    service.history.listeners.append(made.add)
    return made


def status_of(service: Service) -> Status:
    """The headline as of now, with the shell's own troubles in its line."""
    status = view.status(service.core)
    trouble = service.journal.trouble
    return msgspec.structs.replace(
        status,
        up_s=service.clock.now() - service.started_at,
        line=f"{status.line}; {trouble}" if trouble else status.line,
    )


def _for_core(config: Config, endpoint: str, secret: str, journal: str) -> core_config.CoreConfig:
    return core_config.CoreConfig(
        daemon=secrets.token_hex(8),
        version=__version__,
        state_dir=str(config.state_path),
        endpoint=endpoint,
        checkpoint_dir=str(config.state_path / "checkpoints"),
        journal=journal,
        secret=secret,
        allow_injection=config.allow_injection,
        heartbeat_s=config.heartbeat_s,
        lease_s=config.lease_s,
        grace_s=config.grace_s,
        artifacts=config.artifacts_mb > 0,
    )
