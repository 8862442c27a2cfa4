"""The base of a local cluster (``oobleckd.worker.fork.base``): started with it, asked for agents, ended with
it.

Owns that conversation, and where there is no base to be had: the caller starts the agent by exec then, which
takes longer and is otherwise the same. ``OOBLECK_FORK=0`` does without. Who starts many clusters has another
base run all the time and names its folder in ``OOBLECK_BASE``: theirs are forks of it, and where no cluster
runs, programs of a verb are.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import click
import msgspec

from oobleckd.ctl import processes
from oobleckd.ctl.output import note
from oobleckd.ctl.processes import ClusterProcess
from oobleckd.host.interpreter import MODULE, command
from oobleckd.host.standing import ENVIRONMENT, Birth, Born, Ended, standing

NAME = "base"
_MODULE = "oobleckd.worker.fork.base"
_ROOM = "--room=" + "." * 1500  # for the command lines of its forks (``oobleckd.worker.processes.title``)
_LOAD_S, _ANSWER_S = 60.0, 20.0
_LOOK_EVERY_S = 0.02
_LENGTH = struct.Struct("<I")


def is_wanted() -> bool:
    """Whether programs are to be started by fork."""
    try:
        return bool(click.BOOL.convert(os.environ.get("OOBLECK_FORK") or "1", None, None))
    except click.BadParameter:
        return False  # the worker says what is wrong with it


class Done(NamedTuple):
    """What came of a program: its exit code and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class Base:
    """The base whose files lie in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._socket = folder, folder / "base.sock"

    def begin(self, environ: Mapping[str, str]) -> None:
        """Start it, without waiting for it, unless it runs. Raises OSError."""
        if self.process() is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._socket.unlink(missing_ok=True)
            wanted = {**ENVIRONMENT, **os.environ, **environ}
            if not self._begun_by_another(wanted):
                words = command(_MODULE, str(self._socket), _ROOM)
                processes.start(NAME, words, self._folder, self._folder, wanted)

    def _begun_by_another(self, wanted: Mapping[str, str]) -> bool:
        """Whether it could be forked from the base that ``OOBLECK_BASE`` names, which has torch loaded."""
        other = _named()
        if other is None:
            return False
        words = (*MODULE, _MODULE, str(self._socket), _ROOM)
        birth = Birth(words, {**wanted}, str(Path.cwd()), standing(wanted), _MODULE)
        try:
            return isinstance(other.forked(NAME, birth, self._folder, self._folder), ClusterProcess)
        except (OSError, EOFError, ValueError):
            return False

    def process(self) -> ClusterProcess | None:
        """It, if it runs."""
        process = processes.recall(self._folder).get(NAME)
        return process if process is not None and processes.is_alive(process) else None

    def end(self, grace_s: float) -> int:
        """End it; how many had to be killed. Agents live on."""
        process = self.process()
        killed = processes.end([process], grace_s) if process is not None else 0
        processes.forget(NAME, self._folder)
        return killed

    def start(
        self, name: str, command: Sequence[str], run: Path, logs: Path, environ: Mapping[str, str]
    ) -> ClusterProcess | None:
        """As ``processes.start``, by a fork; None where it has to be done without."""
        wanted = {**os.environ, **environ}
        birth = Birth(tuple(command), wanted, str(Path.cwd()), standing(wanted))
        try:
            self.begin(environ)
            forked = self.forked(name, birth, run, logs)
        except (OSError, EOFError, ValueError) as error:
            forked = str(error)
        if isinstance(forked, ClusterProcess):
            return forked
        note(f"{name} is started by exec: {forked}")
        return None

    def run(self, module: str, words: Sequence[str], environ: Mapping[str, str]) -> Done | None:
        """Run a program of ``PROGRAMS`` to its end, by this base or, where it does not run, by the one that
        ``OOBLECK_BASE`` names; None where it has to be done without, or was cut short by the base's end.
        """
        base = self if self.process() is not None else _named()
        if not is_wanted() or base is None:
            return None
        wanted = {**os.environ, **environ}
        birth = Birth(
            (*MODULE, module, *words), wanted, str(Path.cwd()), standing(wanted), module, attended=True
        )
        try:
            with base.connect() as link, TemporaryFile() as out, TemporaryFile() as err:
                if not _ask(link, birth, [out.fileno(), err.fileno()]).pid:
                    return None
                link.settimeout(None)
                code = msgspec.json.decode(_frame(link), type=Ended).code
                out.seek(0)
                err.seek(0)
                return Done(code, out.read().decode(), err.read().decode())
        except (OSError, EOFError, ValueError):
            return None

    def forked(self, name: str, birth: Birth, run: Path, logs: Path) -> ClusterProcess | str:
        """The program, noted in ``run`` with its log in ``logs``; or why there is none. Raises OSError,
        EOFError, ValueError.
        """
        with self.connect() as base, processes.undisturbed():
            logs.mkdir(parents=True, exist_ok=True)
            with (logs / f"{name}.log").open("ab") as log:
                born = _ask(base, birth, [log.fileno()])
            if not born.pid:
                return born.problem
            process = processes.identify(born.pid) or ClusterProcess(born.pid, -1, "")
            processes.remember(name, process, run)
            return process

    def connect(self) -> socket.socket:
        """A connection to it, once it has loaded what it is for. Raises OSError."""
        deadline = time.monotonic() + _LOAD_S
        while self.process() is not None and time.monotonic() < deadline:
            base = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                base.connect(str(self._socket))
            except (FileNotFoundError, ConnectionRefusedError):
                base.close()
                time.sleep(_LOOK_EVERY_S)
            else:
                base.settimeout(_ANSWER_S)
                return base
        raise OSError(f"the base of the agents does not answer; its log: {self._folder / NAME}.log")


def _named() -> Base | None:
    """The one that ``OOBLECK_BASE`` names, if it runs."""
    folder = os.environ.get("OOBLECK_BASE")
    other = Base(Path(folder)) if folder else None
    return other if other is not None and other.process() is not None else None


def _ask(base: socket.socket, birth: Birth, outputs: Sequence[int]) -> Born:
    data = msgspec.json.encode(birth)
    socket.send_fds(base, [_LENGTH.pack(len(data))], outputs)
    base.sendall(data)
    return msgspec.json.decode(_frame(base), type=Born)


def _frame(base: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_read(base, _LENGTH.size))
    return _read(base, length)


def _read(base: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = base.recv(num_bytes - len(data))
        if not more:
            raise EOFError("the base of the agents ended")
        data += more
    return data
