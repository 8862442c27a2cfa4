"""The ``oobleckd`` command: configuration in, one incarnation of the daemon, an exit code out.

Owns the command line, logging, signals and what systemd hears. Exit codes: 0 ended in order, 1 failed, 2
usage or configuration, 5 refused because another daemon is there, or may be. It runs in the foreground;
SIGTERM and SIGINT end it (workers go on training), SIGHUP reads configuration and allow-list anew.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from oobleckd import __version__
from oobleckd.daemon import busy
from oobleckd.daemon.accepting import HEAD_S, GuardedSite, Guests
from oobleckd.daemon.aside import started
from oobleckd.daemon.busy import MeasuredLoop
from oobleckd.daemon.config import Config, load_config
from oobleckd.daemon.http import Api
from oobleckd.daemon.hub import HubError
from oobleckd.daemon.journal import JournalError, JournalLocked
from oobleckd.daemon.keys import KeyFileError
from oobleckd.daemon.place import CopiedState
from oobleckd.daemon.service import Service, open_service, status_of
from oobleckd.daemon.socketfile import keep_at, open_at
from oobleckd.daemon.tls import context_of
from oobleckd.daemon.tokens import TokenError
from oobleckd.daemon.traces import TracesMissing
from oobleckd.host import heap, journald, sd, urgency
from oobleckd.host.mounts import MOUNTS, mount_of
from oobleckd.host.needs import DAEMON_FILES
from oobleckd.host.program import Listed, Program, end
from oobleckd.host.rlimits import RAISE_FILES, raise_file_limit, too_few_files
from oobleckd.host.settings import (
    ConfigError,
    LoadedSettings,
    config_files,
    hints_of,
    is_in_files_alone,
    is_list,
)

FAILED, USAGE, REFUSED = 1, 2, 5
_STATUS_EVERY_S = 1.0
_STREAMS_END_S = 1.0
_SWITCH_S = 0.0005  # for as long the loop waits for a thread that computes, each time that it wants to go on
_NUM_THREADS = 8
_LAST_REQUESTS_S = 0.05
"""What a request may need from its connection to us: there is nothing that would tell that none is on its
way.
"""
_PLACES_HINT = (
    "choose places that this user may use with --state-dir, --keys-dir, --socket, --endpoint and --metrics"
)
_ROOM_HINT = "make room on that file system (`df -h`, `df -i`), and start again: nothing is lost"
_HINTS = {
    errno.ENOSPC: _ROOM_HINT, errno.EDQUOT: _ROOM_HINT, errno.EMFILE: RAISE_FILES, errno.ENFILE: RAISE_FILES,
}  # fmt: skip
_log = logging.getLogger("oobleckd")


class SocketTaken(Exception):
    """Another daemon answers on the API's socket."""

    def __init__(self, path: Path) -> None:
        self.problem = f"another daemon answers on {path}"
        self.hint = "stop that one first, or name another socket with --socket"
        super().__init__(self.problem)


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """One option for every field of ``Config``, so that neither can be forgotten."""
    for field in reversed(msgspec.structs.fields(Config)):
        hint = hints_of(Config)[field.name]
        if is_in_files_alone(Config, field.name):
            continue
        meta = next(extra for extra in hint.__metadata__ if extra.description)
        flag = "--" + field.name.replace("_", "-")
        plain = hint.__origin__
        kind: click.ParamType[Any] | type | None = None
        if plain is bool:
            flag = f"{flag}/--no{flag[1:]}"
        elif is_list(hint):
            kind = Listed()
        elif plain in {int, float, str}:
            kind = plain
        else:
            kind = click.Choice(get_args(plain))
        shown = ",".join(field.default) if is_list(hint) else field.default
        default = f" [{shown}]" if shown not in {"", True, False} else ""
        command = click.option(flag, field.name, type=kind, default=None, help=meta.description + default)(
            command
        )
    return command


@click.command(
    "oobleckd",
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="oobleckd")
@_options
@click.option(
    "--adopt",
    is_flag=True,
    help="Start on a state folder that is a copy: once, where the one it was copied from is gone, or is to "
    "go on by itself.",
)
def main(*, adopt: bool, **flags: Any) -> None:
    """Coordinate training that keeps going when machines die.

    Values also come from OOBLECK_* variables, ./oobleck.toml, ~/.config/oobleck/config.toml and
    /etc/oobleck/config.toml ([daemon]), in this order.
    """

    def load() -> LoadedSettings[Config]:
        return load_config(flags, os.environ, config_files(Path.home(), Path.cwd()))

    place = ""
    try:
        loaded = load()
        place = str(loaded.config.state_path)
        # A daemon that hangs is ended by SIGABRT: then its log has where it stood.
        faulthandler.enable()
        _set_up_logging(loaded.config.log_level)
        if few := too_few_files(raise_file_limit(), DAEMON_FILES, "a daemon without nodes"):
            end(few, RAISE_FILES, USAGE)
        warn_of_place(loaded.config.state_path)
        if loaded.config.realtime and not urgency.hurry():
            _log.info("no real-time scheduling (RLIMIT_RTPRIO): answers come later where all cores compute")
        sys.setswitchinterval(_SWITCH_S)
        with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
            runner.run(_serve(loaded.config, load, adopt=adopt))
    except ConfigError as error:
        end(str(error), error.hint, USAGE)
    except (JournalLocked, SocketTaken, CopiedState) as error:
        end(error.problem, error.hint, REFUSED)
    except TracesMissing as error:
        end(error.problem, error.hint, USAGE)
    except (JournalError, KeyFileError, TokenError, HubError) as error:
        end(error.problem, error.hint, FAILED)
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, _PLACES_HINT)
        end(f"{error.filename or place}: {error.strerror or error}", hint, FAILED)


def _set_up_logging(level: str) -> None:
    """One line an entry on stderr: time (UTC), level, who, what. Where that is the journal, it has fields
    instead.
    """
    formatter = journald.LineFormatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    journald.set_up(level, formatter)


def warn_of_place(state: Path, mounts: Path = MOUNTS) -> None:
    """Say so where the journal lies on a file system that may lose it."""
    # A warning and no refusal: where a cluster has nothing but NFS, one machine's daemon mostly gets away
    # with it, and nobody's jobs should wait for another disk. (D-daemon-027)
    mount = mount_of(state, mounts)
    if mount.unfit in {"network", "unknown"}:
        _log.warning(
            "the state folder %s is on %s (%s), where a write-ahead log may be damaged: put it on a local "
            "disk, Lustre or GPFS with --state-dir",
            state,
            mount.kind,
            mount.point,
        )


async def _serve(config: Config, load: Callable[[], LoadedSettings[Config]], *, adopt: bool) -> None:
    """One incarnation."""
    # A thread that holds the interpreter's lock keeps the loop waiting, and may itself wait for a core that
    # somebody else has: it is as urgent as what waits for it. (D-service-022)
    behind = urgency.hurry_behind if urgency.hurries() else None
    asyncio.get_running_loop().set_default_executor(started(_NUM_THREADS, "aside", behind))
    service = open_service(config, adopt=adopt)
    heap.keep_looks_short()
    runners: list[web.AppRunner] = []
    try:
        try:
            runners.append(await _open_api(service))
            if config.metrics:
                runners.append(await _open_metrics(service))
            keeping = asyncio.create_task(keep_at(runners[0], service.config.socket_path))
            try:
                await _live(service, load)
            finally:
                keeping.cancel()
        finally:
            sd.notify("STOPPING=1")
            await _close_apis(service, runners)
    finally:
        await service.close()
    _log.info("ended; workers go on training")


async def _live(service: Service, load: Callable[[], LoadedSettings[Config]]) -> None:
    """From ready until a signal, or a fault of the core (which is raised)."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    running = service.start()
    running.add_done_callback(lambda _task: ended.set())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    loop.add_signal_handler(signal.SIGHUP, _reload, service, load)
    heartbeat = asyncio.create_task(_tell_systemd(service))
    _log.info("ready: api on %s", service.config.socket_path)
    busy.forget()
    sd.notify("READY=1")
    await ended.wait()
    heartbeat.cancel()
    if running.done():
        running.result()


def _reload(service: Service, load: Callable[[], LoadedSettings[Config]]) -> None:
    sd.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        service.reload(load().config)
    except (ConfigError, KeyFileError, TokenError) as error:
        _log.error("not reloaded: %s; %s", error, error.hint)
    else:
        _log.info("reloaded")
    sd.notify("READY=1")


async def _tell_systemd(service: Service) -> None:
    """The status line, and the watchdog's sign of life: it comes from the loop that does the work."""
    if not os.environ.get("NOTIFY_SOCKET"):
        return
    watchdog_s = sd.watchdog_s()
    every_s = min(_STATUS_EVERY_S, watchdog_s / 3) if watchdog_s else _STATUS_EVERY_S
    while True:
        sd.notify(f"STATUS={status_of(service).line}", "WATCHDOG=1")
        await asyncio.sleep(every_s)


def _of_daemon(record: logging.LogRecord) -> bool:
    """Whether it is the daemon's business: what is no HTTP at all gets its 400, and no page of traceback in
    the log.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _open_api(service: Service) -> web.AppRunner:
    """Serve on systemd's socket, or on our own, and where it is asked for on TCP. Raises SocketTaken,
    ConfigError, OSError.
    """
    logging.getLogger("aiohttp.server").addFilter(_of_daemon)
    app = Api(service).application()
    runner, guests = await _runner(app), Guests(service.hub.spares)
    if service.config.api:
        context = context_of(service.config)
        await GuardedSite(runner, _bound(service.config.api), guests, context=context).start()
    given = sd.listen_sockets()
    if given:
        for sock in given:
            await GuardedSite(runner, sock, guests).start()
        return runner
    path = service.config.socket_path
    _check_free(path)
    await open_at(runner, path, guests)
    return runner


async def _open_metrics(service: Service) -> web.AppRunner:
    """Metrics over TCP, for a Prometheus on this machine. Raises OSError."""
    runner = await _runner(Api(service).scraped())
    await GuardedSite(runner, _bound(service.config.metrics), Guests(service.hub.spares)).start()
    _log.info("metrics on http://%s/metrics", service.config.metrics)
    return runner


async def _runner(app: web.Application) -> web.AppRunner:
    """Of an application whose callers say what they want within a time."""
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=_STREAMS_END_S, keepalive_timeout=HEAD_S, lingering_time=HEAD_S
    )
    await runner.setup()
    return runner


def _bound(address: str) -> socket.socket:
    """A socket on ``HOST:PORT``. Raises OSError."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.strip("[]"), int(port)), family=family)


async def _close_apis(service: Service, runners: Sequence[web.AppRunner]) -> None:
    """Nobody new; who has connected already is heard and answered. systemd's socket stays, and has the next
    incarnation's callers wait.
    """
    for runner in runners:
        for site in runner.sites:
            await site.stop()
    if runners:
        await asyncio.sleep(_LAST_REQUESTS_S)
    service.history.close()
    for runner in runners:
        await runner.cleanup()


def _check_free(path: Path) -> None:
    """Whether nobody answers there (a socket file left over from a kill is fine)."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise SocketTaken(path)


if __name__ == "__main__":
    main()
