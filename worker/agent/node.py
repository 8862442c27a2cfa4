"""The agent of a node (its command line is in ``main``).

Owns the life of the node's device processes, the connection to the daemon and what goes between the
two. Knows nothing of training and never imports torch: it must answer in time whatever torch does.

Devices are forks of a process of the agent's that has torch loaded (``forking``), or started by exec. When a
device process ends, the node's warm spare (``spare``) takes its place; the others do not notice. When there
is none that is ready, the node fails as one: the others are ended too, and all start anew under a new
incarnation. When the agent ends, the kernel ends its devices and the spare.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from oobleckd.host import urgency
from oobleckd.host.starts import FailedStart, forget_failed, note_failed
from oobleckd.protocol import codec
from oobleckd.protocol.agentmessages import (
    Ack,
    DeviceLost,
    Dismiss,
    EndStopped,
    Goodbye,
    Heartbeat,
    Hello,
    Inject,
    LogTold,
    Refused,
    TellLog,
    Wake,
    Welcome,
)
from oobleckd.protocol.artifactmessages import ArtifactHere, ArtifactKept, ArtifactPart, ArtifactTaken
from oobleckd.protocol.datamessages import PrepareData, StopPreparing
from oobleckd.protocol.deaths import Death
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import PROTOCOL
from oobleckd.protocol.nodemessages import DeviceUp, LastWords, TakePlace
from oobleckd.protocol.parts import DeviceInfo
from oobleckd.protocol.versions import OLDEST
from oobleckd.words import count, seconds
from oobleckd.worker.agent.daemon_link import CurveKeys, Uplink
from oobleckd.worker.agent.departure import Departure
from oobleckd.worker.agent.device_link import AgentSide
from oobleckd.worker.agent.endings import Endings
from oobleckd.worker.agent.heartbeat import HeartbeatSender
from oobleckd.worker.agent.injection import inject
from oobleckd.worker.agent.notices import NoticeSource, Poller
from oobleckd.worker.agent.outbox import MessageHead, Outbox, peek
from oobleckd.worker.agent.spare import SpareKeeper
from oobleckd.worker.agent.stopped import Stops, wake
from oobleckd.worker.agent.systemd import SystemdService
from oobleckd.worker.artifacts.sharing import FROM_DAEMON, FROM_DEVICE, Sharing
from oobleckd.worker.fork.forking import Forker, begin
from oobleckd.worker.processes.children import Burials, Child, ChildSetting, Watch, bury
from oobleckd.worker.processes.orphans import Orphans
from oobleckd.worker.processes.preparer import Preparers
from oobleckd.worker.processes.preparing import Preparations
from oobleckd.worker.processes.watchdog import LOOK_EVERY_S
from oobleckd.worker.runtime.host_memory import memory_of_host
from oobleckd.worker.telemetry.figures import FigureTeller, UpDevice
from oobleckd.worker.telemetry.loglines import LogKeeper

EXIT_HOPELESS, EXIT_REFUSED = 1, 5
_HELLO_AGAIN_S = 2.0  # until the daemon has said Welcome
_PLACE_S = 10.0  # what a spare gets to be up in its place: it has little to do
_LOADING_S = 60.0  # and one that was taken while it loaded a kind of layer
_MAX_HEIRS = 3  # that are killed one after the other
_BACKOFF_S = (0.1, 5.0)  # between starts of devices that end before they are up
_OURS = frozenset(
    {
        "Welcome", "Refused", "Dismiss", "Ack", "Inject", "EndStopped", "Wake", "PrepareData",
        "StopPreparing", "TellLog", *FROM_DAEMON,
    }
)  # fmt: skip
_log = logging.getLogger(__name__)


class _Train(msgspec.Struct, frozen=True):
    compile: bool = False


class _Spec(msgspec.Struct, frozen=True):
    train: _Train = _Train()


class _Deployed(msgspec.Struct, frozen=True):
    """What the agent reads of a ``Deploy``: whether it compiles, and all of the job where it does."""

    spec: _Spec = _Spec()


class _DeployedJob(msgspec.Struct, frozen=True):
    spec: Job


_device_up = msgspec.msgpack.Decoder(DeviceUp)
_deployed = msgspec.msgpack.Decoder(_Deployed)
_deployed_job = msgspec.msgpack.Decoder(_DeployedJob)
_last_words = msgspec.msgpack.Decoder(LastWords)


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What the command line says. ``notice_s``: what SIGTERM leaves before the end (0: leave at once);
    ``notices``: who else tells of it. ``read_keys``: the keys as they are in their files by now; None where
    there are none, or they cannot be read. ``fork``: whether devices are to be forks. ``log``: the newest
    lines of the agent's log.
    """

    node: str
    daemon: str
    num_devices: int
    setting: ChildSetting
    keys: CurveKeys | None = None
    read_keys: Callable[[], CurveKeys | None] = lambda: None
    spare: bool = True
    zone: str = ""
    notice_s: float = 0.0
    notices: NoticeSource | None = None
    fork: bool = True
    log: LogKeeper = field(default_factory=LogKeeper)


@dataclass(slots=True)
class _Device:
    """A device process, in its ``incarnation``. ``info`` is None until it is up; ``verdict``: why the agent
    ended it; ``said``: its last words. ``heirs``: how many took the place of one that was up, this one
    included, and none of them was; ``traits``: of the last that was.
    """

    child: Child
    link: AgentSide
    incarnation: str
    info: DeviceInfo | None = None
    verdict: str = ""
    said: Death | None = None
    heirs: int = 0
    traits: dict[str, str] = field(default_factory=dict)


class Agent:
    """One agent; ``run`` is its whole life. Everything happens in the loop of the main thread."""

    def __init__(self, config: AgentConfig, forker: Forker | None, orphans: Orphans) -> None:
        self._config, self._forker, self._orphans = config, forker, orphans
        self._loop = asyncio.get_running_loop()
        self._names = [f"{config.node}/{index}" for index in range(config.num_devices)]
        self._devices: dict[str, _Device] = {}
        self._outbox = Outbox()
        self._identity = secrets.token_hex(8)
        self._device_incarnations = (f"{self._identity}-{number}" for number in itertools.count(1))
        self._known_incarnations: frozenset[str] = frozenset()  # to the daemon, as its last Welcome says
        self._num_restarts = 0
        self._failed_starts = 0
        self._renewing: asyncio.Task[None] | None = None
        self._daemon = ""  # the daemon's incarnation, once it has said Welcome on this connection
        self._replay_due = False
        self._hello_again: asyncio.TimerHandle | None = None
        self._done: asyncio.Future[int] = self._loop.create_future()
        expire = partial(self._leave, overdue=True)
        self._departure = Departure(on_notice=self._noticed, leave=self._leave, expire=expire)
        self._service = SystemdService(self._line)
        self._stops = Stops(self._say)
        self._preparers = Preparers(orphans)
        self._preparations = Preparations(self._preparers.begin, self._say)
        self._poller = Poller(config.notices, self._notice_in_thread) if config.notices is not None else None
        self._watch = Watch(self._on_exit_in_thread)
        self._burials = Burials()
        self._endings = Endings()
        self._begin = partial(begin, setting=config.setting, forker=forker, orphans=orphans)
        self._spare = SpareKeeper(
            self._loop, partial(self._begin, ""), lambda: forker is not None and forker.pid > 0, self._watch,
            self._burials,
            on_change=self._hello, on_heir=self._inherit,
        )  # fmt: skip
        self._uplink = Uplink(
            self._loop,
            config.daemon,
            config.keys,
            on_message=self._from_daemon,
            on_connected=self._connected,
            on_lost=self._lost,
        )
        self._heartbeat_sender = HeartbeatSender(
            self._loop,
            config.daemon,
            self._uplink,
            heartbeat=lambda: self._say(Heartbeat(self.incarnation)),
            is_idle=lambda: not self._jobs(),
        )
        self._figure_teller = FigureTeller(
            self._loop,
            processes=self._processes,
            incarnation=lambda: self.incarnation,
            is_idle=lambda: not self._jobs(),
            say=self._say,
            total_bytes=memory_of_host(0).capacity,
        )
        self._compiled_job: Job | None = None  # that is being deployed, if it compiles
        self._sharing = Sharing(config.setting.compiled_path, self._say, self._answer_device)
        self._telling_logs: set[asyncio.Future[tuple[tuple[str, ...], bool]]] = set()

    @property
    def incarnation(self) -> str:
        """Identity of the node's present incarnation."""
        return f"{self._identity}.{self._num_restarts}"

    async def run(self) -> int:
        """Serve until SIGTERM (and what it leaves, or the next one), SIGINT or a refusal; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._rekey)
        self._loop.add_signal_handler(signal.SIGCHLD, self._orphans.reap)
        if self._forker is not None:
            self._forker.attach(self._loop)
        try:
            self._uplink.connect()
            self._in_task(self._start_devices())
            self._look_after_devices()
            self._service.start()
            return await self._done
        finally:
            await self._close()

    # ------------------------------------------------------------------ devices

    def _in_task(self, change: Coroutine[None, None, None]) -> None:
        """Make a ``change`` to the devices, which are looked after when it is done."""
        self._renewing = self._loop.create_task(change)
        self._renewing.add_done_callback(self._renewed)

    async def _start_devices(self) -> None:
        for name in self._names:
            starting = self._loop.create_task(self._begin(name))
            either: list[asyncio.Future[Any]] = [starting, self._done]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                return
            self._place(name, starting.result())

    def _place(self, name: str, child: Child) -> _Device:
        """``child`` is device ``name`` from now on, in an incarnation of its own."""
        link = AgentSide(self._loop, child.link, on_frame=partial(self._from_device, name), on_end=child.kill)
        device = self._devices[name] = _Device(child, link, next(self._device_incarnations))
        return device

    def _on_exit_in_thread(self, child: Child, evidence: str) -> None:
        self._loop.call_soon_threadsafe(self._on_exit, child, evidence)

    def _on_exit(self, child: Child, evidence: str) -> None:
        if self._done.done() or self._spare.ended(child, evidence):
            return
        device = self._devices.get(child.device)
        if device is None or device.child is not child or self._renewing is not None:
            return
        device.link.drain()
        self._sharing.ended(child.device)
        death = self._endings.of(
            child, device.info, device.verdict or evidence, device.said, self._loop.time()
        )
        evidence = device.verdict or (str(death) if death is not None else evidence)
        _log.error("device %s (pid %d) ended: %s", child.device, child.process.pid, evidence)
        if device.info is not None:
            heir = self._spare.take(child.device)
            # A place without a spare is promised the next fork: that takes 20 ms, and to end the node's
            # life would end its other devices, which nobody killed. (D-devices-019)
            spare = heir is not None or (self._config.spare and self._spare.promise(child.device))
            self._say(DeviceLost(self.incarnation, child.device, evidence, spare=spare, death=death))
            if spare:
                self._pass_to(device, heir)
                return
        # After three heirs in a row that are killed before they are up something kills them, and the node
        # begins anew. (D-devices-019)
        elif death is None and 0 < device.heirs < _MAX_HEIRS and self._spare.promise(child.device):
            self._pass_to(device, None)  # killed before it was up; the daemon knows that somebody is to come
            return
        elif self._endings.hopeless(death, others_up=any(each.info for each in self._devices.values())):
            assert death is not None
            print(f"error: {child.device} cannot start: {death.error}", file=sys.stderr)
            print(f"hint: {death.hint or 'what it printed is above'}", file=sys.stderr)
            self._finish(EXIT_HOPELESS)
            return
        self._failed_starts = 0 if self._all_up() else self._failed_starts + 1
        self._in_task(self._renew(device if device.info is None else None, death))

    def _look_after_devices(self) -> None:
        """End devices that hang, again and again; of those that are stopped the daemon is told, where it
        knows them.
        """
        now = self._loop.time()
        self._endings.look([device.child for device in self._devices.values()], now)
        for name, device in self._devices.items():
            verdict = "" if device.verdict else device.child.watchdog.look(now)
            stopped_s = device.child.watchdog.stopped_s
            # Not ended here: the daemon alone knows who holds a last copy, and while it is away nobody
            # takes a dead device's place, so nothing is lost by asking. (D-detection-014)
            if device.info is not None and not device.verdict and (stopped_s or not verdict):
                self._stops.seen(self.incarnation, name, device.incarnation, verdict, stopped_s, now)
            elif verdict:
                self._end(device, verdict)
        self._loop.call_later(LOOK_EVERY_S, self._look_after_devices)

    @staticmethod
    def _end(device: _Device, verdict: str) -> None:
        device.verdict = verdict
        device.child.kill()

    def _stopped(self, message: EndStopped | Wake) -> None:
        """What follows for a device that is stopped. Nothing where it goes on by now."""
        device = self._devices.get(message.device)
        stop = self._stops.of(message.device, message.incarnation)
        if device is None or stop is None or device.incarnation != message.incarnation:
            return
        if isinstance(message, Wake):
            wake(device.child)
        else:
            self._end(device, stop.evidence)

    def _pass_to(self, device: _Device, heir: Child | None) -> None:
        """The place of ``device``, which has ended, goes to ``heir``, or to the one that is promised."""
        device.info, device.incarnation = None, ""
        if heir is not None:
            self._replace(device, heir)

    def _inherit(self, name: str, heir: Child | None) -> bool:
        """The place ``name`` was promised ``heir``."""
        device = self._devices.get(name)
        if self._done.done() or self._renewing is not None or device is None or device.incarnation:
            return False
        if heir is None:
            self._in_task(self._renew())
            return False
        heir.device = name
        self._replace(device, heir)
        return True

    def _replace(self, old: _Device, heir: Child) -> None:
        """The spare takes the place of a device that has ended."""
        name = heir.device
        _log.warning("the spare (pid %d) is %s now", heir.process.pid, name)
        old.link.close()
        self._burials.add(old.child)
        self._outbox.forget(name)
        device = self._place(name, heir)
        device.heirs, device.traits = old.heirs + 1, old.traits
        device.link.send(codec.encode(TakePlace(name, old.traits)))
        self._loop.call_later(_LOADING_S if heir.is_loading else _PLACE_S, self._check_place, device)
        if heir.is_fork:
            self._spare.keep()  # the next one costs nothing to speak of

    @staticmethod
    def _check_place(device: _Device) -> None:
        """A spare that does not come up is ended, so that the node does not wait for it."""
        if device.info is None:
            _log.error("the spare (pid %d) did not take its place in time", device.child.process.pid)
            device.child.kill()

    async def _renew(self, failed: _Device | None = None, death: Death | None = None) -> None:
        """End what is left of this incarnation, start the next. ``failed`` died before it was up, of
        ``death`` if it said so.
        """
        await self._end_devices()
        if failed is not None:
            words = failed.verdict or (str(death) if death is not None else failed.child.ending())
            hint = death.hint if death is not None else ""
            start = FailedStart(failed.child.device, words, said=death is not None, hint=hint)
            note_failed(self._config.setting.run_dir, start)
        self._num_restarts += 1
        for name in self._names:
            self._outbox.forget(name)
        self._hello()
        if self._failed_starts:
            delay_s = min(_BACKOFF_S[0] * 2**self._failed_starts, _BACKOFF_S[1])
            _log.error("a device ended before it was up (what it printed is above); again in %.1f s", delay_s)
            await asyncio.wait([self._done], timeout=delay_s)
        if not self._done.done():
            await self._start_devices()

    def _renewed(self, task: asyncio.Task[None]) -> None:
        self._renewing = None
        for device in self._devices.values():
            self._watch.add(device.child)
        error = task.exception()
        if error is not None and not self._done.done():
            self._done.set_exception(error)

    async def _end_devices(self) -> None:
        """Kill all device processes and reap them: what they hold is on disk, elsewhere, or lost to whatever
        ended the node.
        """
        self._spare.forget_promises()
        devices, self._devices = list(self._devices.values()), {}
        children = [device.child for device in devices]
        self._watch.discard(children)
        for device in devices:
            device.child.kill()
            device.link.close()
            self._sharing.ended(device.child.device)
        for child in children:
            await bury(child)

    def _all_up(self) -> bool:
        return len(self._devices) == len(self._names) and all(d.info for d in self._devices.values())

    def _from_device(self, name: str, data: bytes) -> None:
        try:
            head = peek(data)
        except codec.CodecError as error:
            _log.error("device %s sent what is no message: %s", name, error)
            return
        if head.type == "DeviceUp":
            self._device_up(name, data)
        if head.type in {"DeviceUp", "SpareUp", "LayersLoaded"}:  # of one that was taken before it said so
            return
        if head.type == "LastWords":
            self._devices[name].said = _last_words.decode(data).death
            return
        if head.type in FROM_DEVICE:
            self._sharing.from_device(name, data)
            return
        if head.type == "Ready" and self._compiled_job is not None:
            self._spare.compiled(self._compiled_job)  # by now all that it is to load is on disk
        self._outbox.said(head, data)
        self._uplink.send(data)

    def _device_up(self, name: str, data: bytes) -> None:
        was_up, device = self._all_up(), self._devices[name]
        if device.info is None:
            self._endings.up(device.child)
        device.info, device.heirs = (
            msgspec.structs.replace(_device_up.decode(data).info, incarnation=device.incarnation),
            0,
        )
        device.traits = device.info.traits
        if self._all_up() and not was_up:
            self._endings.all_up()
            forget_failed(self._config.setting.run_dir)
            if self._config.spare:
                self._spare.keep()
            self._hello()

    # ------------------------------------------------------------------ daemon

    def _connected(self) -> None:
        self._heartbeat_sender.forget()
        self._sharing.lost()
        self._daemon, self._known_incarnations = "", frozenset()
        self._replay_due = True
        self._hello()

    def _lost(self) -> None:
        self._heartbeat_sender.forget()
        self._sharing.lost()

    def _hello(self) -> None:
        """Say who and what we are; again and again until the daemon answers."""
        infos = tuple(device.info for device in self._devices.values() if device.info is not None)
        config, spare = self._config, self._spare.state
        who = config.node, self.incarnation, config.setting.host
        # A field of Hello and in no journal: it ends with the incarnation that has it, so nobody has to
        # undrain a machine that is back. (D-service-005)
        notice = self._departure.notice
        ready, prepares = self._all_up(), True
        self._say(Hello(PROTOCOL, *who, ready, infos, spare, config.zone, notice, OLDEST, prepares))
        if self._hello_again is not None:
            self._hello_again.cancel()
            self._hello_again = None
        if not self._daemon and not self._done.done():
            self._hello_again = self._loop.call_later(_HELLO_AGAIN_S, self._hello)

    def _answer_device(self, name: str, answer: ArtifactHere) -> None:
        if (device := self._devices.get(name)) is not None:
            device.link.send(codec.encode(answer))

    def _say(self, message: msgspec.Struct) -> None:
        self._uplink.send(codec.encode(message))

    def _from_daemon(self, data: bytes) -> None:
        try:
            head = peek(data)
            if head.type in _OURS:
                self._mine(codec.decode_to_worker(data), data)
            else:
                self._pass_on(head, data)
        except codec.CodecError as error:
            _log.warning("ignored a message of the daemon: %s", error)

    def _pass_on(self, head: MessageHead, data: bytes) -> None:
        device = self._devices.get(head.device)
        if device is None:
            _log.warning("ignored %s for %r: no such device is running", head.type, head.device)
            return
        # A fence: the last Welcome names the lives that it knew, and what was sent to another was meant for
        # the process before (docs/mechanisms/devices.md, 4).
        if device.incarnation not in self._known_incarnations:
            _log.info(
                "ignored %s for %s: it is meant for the incarnation before this one", head.type, head.device
            )
            return
        self._outbox.told(head)
        if head.type == "Deploy":
            compiles = _deployed.decode(data).spec.train.compile
            self._compiled_job = _deployed_job.decode(data).spec if compiles else None
            if not compiles:
                self._spare.compiled(None)
        # The device's loop holds Python's lock, so it is lent the haste of who is to answer, and gives it
        # back then. Less is lent than the lender has, or a layer could keep its core. (D-recovery-021)
        if head.type == "Report":
            urgency.lend(device.child.process.pid)  # it gives that back (``device``)
        device.link.send(data)

    def _mine(self, message: object, data: bytes) -> None:
        match message:
            case Welcome():
                self._welcome(message)
            case Refused():
                print(f"error: the daemon refused {self._config.node}: {message.reason}", file=sys.stderr)
                print(f"hint: {message.hint}", file=sys.stderr)
                self._finish(EXIT_REFUSED)
            case Dismiss():
                self._departure.dismissed()
            case Ack():
                self._outbox.acknowledge(message.job, message.round)
            case Inject():
                self._inject(message, data)
            case EndStopped() | Wake():
                self._stopped(message)
            case PrepareData():
                self._preparations.prepare(message)
            case StopPreparing():
                self._preparations.stop(message.job)
            case TellLog():
                self._tell_log(message)
            case ArtifactKept() | ArtifactPart() | ArtifactTaken():
                self._sharing.heard(message)

    def _welcome(self, message: Welcome) -> None:
        changed = self._daemon not in {"", message.daemon}
        self._daemon, self._known_incarnations = message.daemon, frozenset(message.incarnations)
        if changed:
            # Another daemon behind the same connection (a proxy): it has heard no Hello of ours.
            self._replay_due = True
            self._hello()
        if self._hello_again is not None:
            self._hello_again.cancel()
            self._hello_again = None
        if self._replay_due:
            self._replay_due = False
            for data in self._outbox.pending():
                self._uplink.send(data)
            self._preparations.say_again()
        self._sharing.welcomed(keeps=message.artifacts)
        self._heartbeat_sender.welcome(message)
        self._figure_teller.welcome(message)

    def _processes(self) -> list[UpDevice]:
        """Devices that are up."""
        return [
            UpDevice(device.info, device.child.process.pid)
            for device in self._devices.values()
            if device.info is not None
        ]

    def _tell_log(self, message: TellLog) -> None:
        """Beside the loop: the log may be a file on a disk that is slow."""

        def told(found: asyncio.Future[tuple[tuple[str, ...], bool]]) -> None:
            self._telling_logs.discard(found)
            if not (found.cancelled() or self._done.done()):
                self._say(LogTold(message.ticket, *found.result()))

        asked = self._loop.run_in_executor(None, self._config.log.newest, message.num_lines)
        self._telling_logs.add(asked)
        asked.add_done_callback(told)

    def _jobs(self) -> list[str]:
        """What devices of the node have state of."""
        infos = [device.info for device in self._devices.values()]
        return sorted({info.job for info in infos if info is not None and info.job})

    def _line(self) -> str:
        """What a person wants to know first."""
        num_up, jobs = sum(device.info is not None for device in self._devices.values()), self._jobs()
        words = [
            f"{num_up} of {count(len(self._names), 'device')} up",
            f"trains {', '.join(jobs)}" if jobs else "no job",
        ]
        if self._preparations.job:
            words.append(f"prepares the data of {self._preparations.job}")
        words.append(f"daemon {self._config.daemon}" if self._daemon else "the daemon is away")
        notice = self._departure.notice
        return ", ".join([*words, f"ends in {seconds(notice.left_s)}"] if notice is not None else words)

    # ------------------------------------------------------------------ ends

    def _inject(self, message: Inject, data: bytes) -> None:
        """A failure on demand."""
        inject(
            message,
            [device.child for device in self._devices.values()],
            self._uplink,
            pass_on=lambda child: self._devices[child.device].link.send(data),
            leave=self._leave,
        )

    def _on_signal(self, number: signal.Signals) -> None:
        """The first SIGTERM leaves time, where it does; whoever says it again later, or SIGINT, means now."""
        # Who starts an agent by hand means now, so a notice is 0 s unless it is asked for: units, which
        # know their deadline, ask for it. (D-service-008)
        if number == signal.SIGTERM and self._config.notice_s and self._departure.notice is None:
            self._departure.noticed(number.name, self._config.notice_s)
        elif number != signal.SIGTERM or not self._departure.just_noticed:
            self._leave(number.name)

    def _notice_in_thread(self, reason: str, left_s: float) -> None:
        self._loop.call_soon_threadsafe(self._departure.noticed, reason, left_s)

    def _noticed(self) -> None:
        """Ask to be let go. Where there is no daemon, and no device with state, there is nobody to ask and
        nothing to save.
        """
        # The daemon alone knows whether a layout, or one that is being deployed, has a device of this node.
        # Until it says so the agent works on as ever. (D-service-006)
        if self._daemon or self._jobs():
            self._hello()
        else:
            self._departure.dismissed()

    def _rekey(self) -> None:
        """SIGHUP: the files of the keys have changed."""
        keys = self._config.read_keys()
        if keys is not None:
            self._uplink.rekey(keys)
            _log.info("the keys are read anew")

    def _leave(self, reason: str, *, overdue: bool = False) -> None:
        if not self._done.done():
            self._say(Goodbye(self.incarnation, reason, overdue))
            self._finish(0)

    def _finish(self, code: int) -> None:
        if not self._done.done():
            self._done.set_result(code)

    async def _close(self) -> None:
        self._service.close()
        self._departure.close()
        if self._poller is not None:
            self._poller.close()
        self._heartbeat_sender.close()
        self._figure_teller.close()
        if self._hello_again is not None:
            self._hello_again.cancel()
        if self._renewing is not None:
            await asyncio.wait([self._renewing])
        self._preparations.close()
        await self._preparers.ended()
        await self._end_devices()
        await self._sharing.close()
        await self._spare.close()
        await self._burials.done()
        if self._forker is not None:
            self._forker.close()
        self._watch.close()
        self._endings.close()
        self._uplink.close()
