"""The process of sinks, which the daemon starts: ``python -P -m oobleckd.sinks.program``.

Owns its beginning and end. It is told what to do by one line of JSON (``SinkOrders``) on its standard
input, which the daemon keeps open: it ends when that does, however the daemon ended. It reads the daemon's
API as any client does, so it can neither slow it nor harm it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from oobleckd.client import Client
from oobleckd.host import journald
from oobleckd.protocol.sinks import SinkOrders
from oobleckd.sinks.onevent import RuleFollower
from oobleckd.sinks.overseer import Overseer

_END_S = 1.0  # in which what is being written is to be finished; what is not comes in the next life
_API_S = 30.0
_log = logging.getLogger("oobleckd.sinks")


def main() -> None:
    """Work until the daemon is gone."""
    faulthandler.enable()  # `kill -ABRT` says where it hangs
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=SinkOrders)
    ended = threading.Event()
    threading.Thread(target=_await_end, args=(ended,), name="daemon-watch", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    _set_up_logging(orders.log_level)
    _be_ordinary()
    folder = Path(orders.folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o750)
    for name in ("CACHE", "CONFIG", "DATA"):  # a service has no home that it may write
        os.environ.setdefault(f"WANDB_{name}_DIR", str(folder / "wandb" / f".{name.lower()}"))
    with _alone(folder / "lock", ended):
        if not ended.is_set():
            _work(orders, folder, ended)
    logging.shutdown()
    os._exit(0)  # whatever hangs: what it has not written is in the journal


def _work(orders: SinkOrders, folder: Path, ended: threading.Event) -> None:
    client = Client(orders.socket, timeout_s=_API_S)
    overseer = Overseer(client, orders.kinds, folder)
    followers = [RuleFollower(client, rule, folder / "on_event") for rule in orders.rules]
    for thread in (overseer, *followers):
        thread.start()
    ended.wait()
    for follower in followers:
        follower.stop()
    overseer.stop(_END_S)


def _await_end(ended: threading.Event) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    ended.set()


@contextlib.contextmanager
def _alone(lock: Path, ended: threading.Event) -> Iterator[None]:
    """Not before the process of an earlier daemon has let go of the folder."""
    with lock.open("w") as file:
        while not ended.is_set():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                ended.wait(0.1)
        yield


def _be_ordinary() -> None:
    """The daemon is the last to be ended for memory; this process is not."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0", encoding="ascii")


def _set_up_logging(level: str) -> None:
    formatter = journald.LineFormatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    journald.set_up(level, formatter)


if __name__ == "__main__":
    main()
