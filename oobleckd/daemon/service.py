"""The daemon's parts put together: journal, core, hub, planner, history, loop, in the order in which they live.

Owns start, stop and reload. Stopping tells nobody anything: workers go on training, keep what they have
to say, and say it to the next life of the daemon.

Errors: JournalError, KeyFileError, HubError, each with ``hint``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass

import msgspec

from oobleckd import __version__
from oobleckd.core import config as core_config
from oobleckd.core.context import Core
from oobleckd.core.entries import AnyEntry, StepEntry
from oobleckd.core.machine import Machine
from oobleckd.daemon import keys
from oobleckd.daemon.clock import Clock
from oobleckd.daemon.config import Config
from oobleckd.daemon.history import History
from oobleckd.daemon.hub import Hub
from oobleckd.daemon.journal import Journal, StepRow
from oobleckd.daemon.loop import Loop
from oobleckd.daemon.planning import Planning

_LAST_WRITES_S = 2.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Service:
    """One life of the daemon. Made by ``open_service``, on the event loop that it will live on."""

    config: Config
    clock: Clock
    started_at: float
    journal: Journal
    machine: Machine
    history: History
    planning: Planning
    hub: Hub
    loop: Loop
    running: asyncio.Task[None] | None = None

    @property
    def core(self) -> Core:
        """The core's state, for views."""
        return self.machine.core

    def start(self) -> asyncio.Task[None]:
        """Listen to agents, and warm the planner beside it. The task ends with a fault of the core alone."""
        self.running = asyncio.create_task(self.loop.run(), name="loop")
        self.hub.start(self.loop.heard, self.loop.lost)
        self.planning.warm()
        return self.running

    def reload(self, config: Config) -> None:
        """Take over what may change in a life: allow-list and log level. Raises KeyFileError."""
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

    async def close(self) -> None:
        """End in order. What is under way is on disk or unacknowledged afterwards."""
        self.history.close()
        self.loop.stop()
        if self.running is not None:
            await asyncio.wait({self.running}, timeout=_LAST_WRITES_S)
        # On a failing disk the loop still waits for it: closing the journal ends that.
        await asyncio.to_thread(self.journal.close)
        if self.running is not None:
            await asyncio.wait({self.running})
        self.planning.close()
        self.hub.close()


def open_service(config: Config) -> Service:
    """Lock and read the journal, bind the endpoint, and stand where the last life ended."""
    clock = Clock()
    history = History(config.history)
    loop = asyncio.get_running_loop()

    def on_trouble(trouble: str) -> None:
        text = trouble or "the journal can be written again; nothing was lost"
        loop.call_soon_threadsafe(history.notice, text, "error" if trouble else "info")

    journal = Journal(config.state_path, step_of=step_row, on_trouble=on_trouble)
    try:
        return _assemble(config, clock, journal, history)
    except BaseException:
        journal.close()
        raise


def step_row(entry: msgspec.Struct) -> StepRow | None:
    """Columns of a committed round, None for any other entry."""
    if not isinstance(entry, StepEntry):
        return None
    return StepRow(entry.job, entry.counters.round, entry.counters.step, entry.outcome, entry.loss)


def _assemble(config: Config, clock: Clock, journal: Journal, history: History) -> Service:
    entries = journal.read(AnyEntry)
    pair, allowed = None, {}
    if config.curve:
        pair = keys.make_server_keys(config.keys_path)
        allowed = keys.load_authorized(config.keys_path)
    secret = keys.job_secret(config.state_path)
    hub = Hub(config.endpoint, pair=pair, allowed=allowed)
    try:
        machine = Machine.restore(entries, clock.now(), _for_core(config, hub.endpoint, secret))
    except BaseException:
        hub.close()
        raise
    history.restore(machine.core.state.history, machine.core.state.seq)

    def on_trouble(text: str) -> None:
        _log.warning("%s", text)
        history.notice(text, "warn")

    planning = Planning(on_trouble=on_trouble)
    made = Loop(machine, journal, history, planning, hub.tell, clock)
    _log.info("read %d entries of %s; agents connect to %s", len(entries), journal.path, hub.endpoint)
    return Service(config, clock, clock.now(), journal, machine, history, planning, hub, made)


def _for_core(config: Config, endpoint: str, secret: str) -> core_config.Config:
    return core_config.Config(
        daemon=secrets.token_hex(8),
        version=__version__,
        state_dir=str(config.state_path),
        endpoint=endpoint,
        checkpoint_dir=str(config.state_path / "checkpoints"),
        secret=secret,
        allow_injection=config.allow_injection,
        beat_s=config.beat_s,
        lease_s=config.lease_s,
        grace_s=config.grace_s,
    )
