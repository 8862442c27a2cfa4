"""Programs of a peer: started, stopped for a while, and ended, by their process ids and no other way.

Owns the processes that it started and all that came from them. Owns no meaning of what they write down.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from benchmarks.peers.attempts import FOLDER, Attempt, AttemptReader
from oobleckd.host.ports import free_port

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
_LOOK_EVERY_S = 0.1
_GRACE_S = 5.0
_ISOLATED = "OOBLECK_BENCH_ISOLATED"


class PeerFailed(Exception):
    """A peer ended by itself or did not come so far in time; the message has the end of its output."""


class Programs:
    """Programs that write attempts into ``folder``, each started with this project's root as its folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._reader = AttemptReader(folder)
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self, name: str, argv: list[str], **environment: str) -> None:
        """Start a program; its output goes to ``name``.out."""
        settings = {
            "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            FOLDER: str(self.folder), **environment,
        }  # fmt: skip
        with (self.folder / f"{name}.out").open("ab") as out:
            self._started.append(
                subprocess.Popen(argv, cwd=ROOT, env={**os.environ, **settings}, stdout=out, stderr=out)
            )

    def attempts(self) -> list[Attempt]:
        """All attempts so far, oldest first."""
        return self._reader.attempts()

    def until(self, found: Callable[[list[Attempt]], T | None], what: str, timeout_s: float) -> T:
        """The first result of ``found`` that is not None. Raises PeerFailed."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            result = found(self.attempts())
            if result is not None:
                return result
            ended = [program for program in self._started if program.poll() is not None]
            if ended:
                raise PeerFailed(f"{what}: a program ended with {ended[0].returncode}: {self._last_words()}")
            time.sleep(_LOOK_EVERY_S)
        raise PeerFailed(f"{what}: not within {timeout_s:g} s: {self._last_words()}")

    def pause(self) -> None:
        """Stop everything where it is; see ``stop``."""
        stop(self._family())

    def resume(self) -> None:
        """Go on."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """End everything: in order if it listens, by SIGKILL if it does not."""
        family = self._family()
        for program in self._started:
            program.terminate()
        self._signal(signal.SIGCONT)
        deadline = time.monotonic() + _GRACE_S
        for program in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(max(0.0, deadline - time.monotonic()))
        send(signal.SIGKILL, family)
        for program in self._started:
            program.wait()
        self._started.clear()

    def _family(self) -> list[int]:
        return family_of([program.pid for program in self._started if program.poll() is None])

    def _signal(self, number: signal.Signals) -> None:
        send(number, self._family())

    def _last_words(self) -> str:
        said = [
            line
            for file in sorted(self.folder.glob("*.out"))
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
            if "Error" in line or "error:" in line
        ]
        return (said or [f"see {self.folder}"])[-1][:300]


def family_of(pids: Iterable[int]) -> list[int]:
    """The processes and all their descendants that run now (torchrun's are in sessions of their own)."""
    family, found = [], list(pids)
    while found:
        pid = found.pop()
        family.append(pid)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return family


def state_of(pid: int) -> str:
    """The kernel's letter for what the process does; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Signal processes of our own, whether they still run or not."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def stop(pids: Iterable[int]) -> None:
    """SIGSTOP to processes of our own; returns when they stand and use no processor until SIGCONT."""
    stopped = list(pids)
    send(signal.SIGSTOP, stopped)
    while any(state_of(pid) not in {"T", "Z", ""} for pid in stopped):
        time.sleep(0.001)


def endable(main: Callable[[], int]) -> int:
    """What ``main`` returns, or 130 if Ctrl-C or SIGTERM ended it, by way of everything that ends what it
    started.

    Only the first signal counts: ``timeout`` sends two, and the second would cut the ending short.
    """

    def interrupt(_number: int, _frame: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        return main()
    except KeyboardInterrupt:
        print("stopped; what this had started is ended", file=sys.stderr)
        return 130


def start_ranks(programs: Programs, module: str, *args: str, **environment: str) -> None:
    """Start one process a device of ``module`` as torchrun would, without an agent beside them."""
    port = str(free_port())
    for rank in range(4):
        programs.start(
            f"rank{rank}", [sys.executable, "-m", module, *args], RANK=str(rank), LOCAL_RANK=str(rank),
            WORLD_SIZE="4", LOCAL_WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **environment,
        )  # fmt: skip


def isolate() -> None:
    """Start this program again with nothing but loopback for a network, where the system allows it.

    torch's TCPStore asks the name server about every connection, and a slow answer (5 s have been seen) would
    be charged to the peer.
    """
    unshare = shutil.which("unshare")
    if unshare is None or os.environ.get(_ISOLATED):
        return
    flags = ["--net"] if os.geteuid() == 0 else ["--net", "--map-root-user"]
    if subprocess.run(
        [unshare, *flags, "ip", "link", "set", "lo", "up"], capture_output=True, check=False
    ).returncode:
        return
    os.environ[_ISOLATED] = "1"
    again = ["sh", "-c", 'ip link set lo up; exec "$@"', "sh", sys.executable, *sys.argv]
    os.execv(unshare, [unshare, *flags, *again])
