"""What the agent starts: a device process, or the warm spare that waits for a device's place.

Owns the command line, the ties to the agent (held before the seconds that importing torch takes), and the
spare's waiting. What a device does is in ``device``. Not meant to be started by hand.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from oobleckd.host.journald import LineFormatter
from oobleckd.host.orphans import die_with_parent
from oobleckd.protocol import codec
from oobleckd.protocol.job import Job
from oobleckd.protocol.nodemessages import LastWords, LayersLoaded, LoadLayers, SpareUp, TakePlace
from oobleckd.worker.runtime.activity import ActivityPage
from oobleckd.worker.runtime.deaths import death_of
from oobleckd.worker.runtime.errors import UserError, at_the_end, ends_the_process
from oobleckd.worker.runtime.framing import read_frame, write_frame
from oobleckd.worker.runtime.lifeline import hold

if TYPE_CHECKING:  # what it imports is imported later, at another priority
    from oobleckd.worker.device.compiling import Compiling

# At the lowest priority the import's five CPU seconds took more than three minutes where four processes
# train on two cores, and a second loss in that time found no spare. (D-devices-002)
_NICER_BY = 5
"""A third of a training process's share: on cores that train without a pause, less would take minutes."""
_SWITCH_S = 0.0003
"""How long a thread that has something to say waits for the interpreter, where one that computes takes it
again and again.
"""
HEAVY = ("oobleckd.worker.device.device",)
"""And with it torch, transformers and the engine."""
_log = logging.getLogger(__name__)


@click.command()
@click.option("--device", default="", help="Name of the device; a spare is told it later.")
@click.option("--kind", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--fd", type=int, required=True)
@click.option("--run-dir", type=click.Path(path_type=Path), required=True)
@click.option("--compiled-dir", type=click.Path(path_type=Path))
@click.option("--bind", default="127.0.0.1")
@click.option("--host", default="")
@click.option("--parent", type=int, required=True)
@click.option("--lifeline", type=(int, int), required=True)
@click.option("--activity", type=int, required=True)
@click.option("--urgent", is_flag=True, help="Answer the daemon before ordinary programs have their turn.")
def main(
    device: str,
    kind: str,
    fd: int,
    run_dir: Path,
    compiled_dir: Path | None,
    bind: str,
    host: str,
    parent: int,
    lifeline: tuple[int, int],
    activity: int,
    urgent: bool,
) -> None:
    """A device process of an agent, or its spare."""
    sys.setswitchinterval(_SWITCH_S)
    # The agent's to hear: a batch system tells all processes of a node, and this one is needed until the
    # agent leaves.
    # A device ends with its agent, by SIGKILL, and needs no other end. (D-service-007)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(parent)
    hold(*lifeline)
    at_the_end(partial(tell_agent, fd))
    with ends_the_process("start"):
        import_for_good(HEAVY)
        # Its stderr is the agent's, whose log it is.
        handler = logging.StreamHandler()
        handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        loading = Loading(kind, compiled_dir or run_dir / "compiled")
        place = TakePlace(device) if device else wait_for_place(fd, loading)
        from oobleckd.worker.device.context import DeviceContext
        from oobleckd.worker.device.device import DeviceProcess

        process = DeviceProcess(
            DeviceContext(place.device, kind, host, bind, run_dir, urgent, compiled_dir, place.before),
            fd,
            ActivityPage(activity),
            loading.compiling,
        )
    with ends_the_process():
        process.run()


def tell_agent(fd: int, error: Exception, phase: str) -> bool:
    """Say on the agent's socket ``fd``, on which nobody else says anything yet, why this process ends."""
    death = death_of(error, phase)
    if death is not None:
        with socket.socket(fileno=os.dup(fd)) as agent:
            write_frame(agent, codec.encode(LastWords(death)))
    return False


def import_for_good(modules: Sequence[str]) -> None:
    """``import_gently`` what is needed to the end of the process: its 200 000 objects are no garbage
    collector's business.

    Looking through them as they become more takes about a tenth of the import's time, and later 0.1 s in the
    middle of a step.
    """
    if all(module in sys.modules for module in modules):
        return  # this is a fork of a process that has them (``forker``)
    # A full collection goes through 210 000 objects: 0.12 s at any moment of a step, and a tenth of the
    # import's CPU time. (D-devices-007)
    gc.disable()
    import_gently(modules)
    gc.freeze()
    gc.enable()


def import_gently(modules: Sequence[str]) -> None:
    """Import ``modules`` at a lower priority: those that train, or mend a step, go first.

    In a thread, since a priority that was lowered cannot be raised again without privileges.
    """
    # An import took a quarter of two busy cores from the survivors at the very moment when they mend a
    # step. (D-devices-006)
    with ThreadPoolExecutor(1) as gently:
        gently.submit(_import, modules).result()


def _has_more(agent: socket.socket) -> bool:
    return bool(select.select([agent], [], [], 0)[0])


class Loading:
    """What a spare has loaded of the compiled layers of a job, from ``folder``; ``compiling`` is the place's
    when it is taken, None while there is nothing.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        self.compiling: Compiling | None = None

    def load(self, job: Job, is_wanted: Callable[[], bool]) -> int:
        """Load all kinds of layers of ``job`` that are in the folder, until it ``is_wanted`` elsewhere; how
        many there are.
        """
        # As the imports at the start: who trains goes first.
        with ThreadPoolExecutor(1, initializer=_give_way) as gently:
            kinds = gently.submit(self._load, job, is_wanted).result()
        gc.freeze()
        return kinds

    def _load(self, job: Job, is_wanted: Callable[[], bool]) -> int:
        import torch

        from oobleckd.worker.device.compiling import Compiling, load_kept
        from oobleckd.worker.models import compiled

        if self._kind != "cpu":
            compiled.load()  # a card's program is loaded with memory of the card, of which a spare has none
            return 0
        device = torch.device("cpu")
        try:
            self.compiling = self.compiling or Compiling(self._folder, device)
            return load_kept(self.compiling, device, job, is_wanted)
        except (UserError, OSError, RuntimeError, MemoryError):
            # Whoever takes a place with less loads the rest there, and says what is wrong with it.
            _log.exception("the spare cannot load compiled layers")
            self.compiling = None
            return 0


def wait_for_place(fd: int, loading: Loading) -> TakePlace:
    """Say on the agent's socket ``fd`` that all is imported, and sleep until a device's place is free; load
    compiled layers where the agent says that they will be needed.

    Returns which one that is. Raises EOFError when the agent is gone.
    """
    with socket.socket(fileno=os.dup(fd)) as agent:
        write_frame(agent, codec.encode(SpareUp()))
        while (data := read_frame(agent)) is not None:
            order = msgspec.msgpack.decode(data, type=TakePlace | LoadLayers)
            if isinstance(order, TakePlace):
                return order
            kinds = loading.load(order.spec, partial(_has_more, agent))
            write_frame(agent, codec.encode(LayersLoaded(kinds)))
    raise EOFError("the agent is gone")


def _import(modules: Sequence[str]) -> None:
    _give_way()
    for module in modules:
        importlib.import_module(module)


def _give_way() -> None:
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER_BY))


if __name__ == "__main__":
    main()
