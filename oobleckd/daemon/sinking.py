"""Starts the process of sinks, has it started anew when it dies, and ends it with the daemon.

Owns the process, and a thread that waits for it: the loop never does. What the process does is
``oobleckd.sinks``; it reads the API as any client does, so that no sink can slow the daemon or harm it.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import threading
import time
from collections.abc import Collection, Iterable
from importlib.metadata import entry_points

import msgspec

from oobleckd.daemon.config import Config
from oobleckd.host import interpreter
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobsinks import BUILT_IN, EXTRAS
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.sinks import SinkOrders

PROGRAM = "oobleckd.sinks.program"
_AGAIN_S = (0.5, 2.0, 10.0, 30.0)
_LIVED_S = 60.0  # who died after this has not died of what the last one did
_END_S = 3.0  # for what is being written; it has less itself
_log = logging.getLogger(__name__)


def orders_of(config: Config) -> SinkOrders:
    """What the process is to do."""
    return SinkOrders(
        str(config.socket_path), str(config.sinks_path), config.sinks, config.on_event, config.log_level
    )


def check_allowed(job: Job, kinds: Collection[str]) -> None:
    """Whether all sinks of ``job`` are allowed, by their ``kinds``, and can be used here. Reads what is
    installed. Raises JobError.
    """
    for index, table in enumerate(job.sinks):
        where = f"sink[{index}].kind"
        if table.kind not in kinds:
            offered = ", ".join(kinds) or "none"
            raise JobError(
                where,
                f"the daemon has no sink {table.kind!r}: it offers {offered}",
                "choose one of these, or have it named under sinks in [daemon] (docs/sinks.md)",
            )
        if table.kind in EXTRAS and importlib.util.find_spec(table.kind) is None:
            raise JobError(
                where,
                f"the package {table.kind} is not installed where the daemon runs",
                f"pip install 'oobleckd[{table.kind}]' there, or leave this sink out",
            )
        if table.kind not in BUILT_IN and not entry_points(group="oobleckd.sinks", name=table.kind):
            raise JobError(
                where,
                f"no package that is installed where the daemon runs offers a sink {table.kind!r}",
                "install it there, or leave this sink out",
            )


class Sinking:
    """The process, by ``orders``. It is started when ``look`` first finds something to write."""

    def __init__(self, orders: SinkOrders) -> None:
        self._orders = orders
        self._wanted, self._closing = threading.Event(), threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        # Before the loop serves anybody: it would wait until a new thread has its turn. (D-service-026)
        self._thread = threading.Thread(target=self._run, name="sinks", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the process, None while there is none."""
        return self._process.pid if self._process is not None else None

    def look(self, jobs: Iterable[Job]) -> None:
        """Start it where there are rules, or one of ``jobs`` has sinks; once. Returns at once."""
        if not self._wanted.is_set() and (self._orders.rules or any(job.sinks for job in jobs)):
            self._wanted.set()

    def close(self) -> None:
        """End it. Waits for what is being written, and not for who hangs."""
        self._closing.set()
        self._wanted.set()
        process = self._process
        if process is not None:
            assert process.stdin is not None, "a pipe"
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._thread.join(_END_S)

    def _run(self) -> None:
        """A thread of its own, not the loop's: to start a process takes milliseconds, and it is waited for as
        long as the daemon lives.
        """
        deaths = 0
        self._wanted.wait()
        while not self._closing.is_set():
            begun = time.monotonic()
            try:
                code = self._once()
            except OSError as error:
                _log.warning("the process of sinks cannot be started: %s", error)
                code = -1
            if self._closing.is_set():
                return
            deaths = 0 if time.monotonic() - begun > _LIVED_S else deaths
            wait_s = _AGAIN_S[min(deaths, len(_AGAIN_S) - 1)]
            deaths += 1
            _log.warning("the process of sinks ended (%d): it is started anew in %.1f s", code, wait_s)
            self._closing.wait(wait_s)

    def _once(self) -> int:
        # A pipe that only we hold open: it ends with us, also if we are killed. No real-time scheduling: what
        # an urgent thread starts is ordinary. (D-sinks-006)
        process = subprocess.Popen(
            interpreter.command(PROGRAM), stdin=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None, "a pipe"
        self._process = process
        try:
            process.stdin.write(msgspec.json.encode(self._orders) + b"\n")
            process.stdin.flush()
        except OSError:  # it is dead already, or we are closing
            _log.debug("the process of sinks did not hear what to do")
        return process.wait()
