"""A device process without torch, for tests of the agent: it speaks the link's protocol and no more. Without
a device's name it is a spare.

A Report is answered with Progress, a Resume with a StepDone whose round is the epoch, an Inject at "exit"
with the end of the process, one at "hunger" with ``HUNGRY`` as its last words and the end. ``STANDIN_CRASH``
in the environment makes it end before it is up, ``STANDIN_SAYS`` as well, with that error as its last words
(a kind and a text, with ": " between); ``STANDIN_STUCK`` names a folder to make: the spare that makes it
hangs in the place that it is to take.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click

from oobleckd.host.orphans import die_with_parent
from oobleckd.protocol.agentmessages import Inject
from oobleckd.protocol.deaths import OUT_OF_MEMORY, TO_MEND, Death, Memory
from oobleckd.protocol.messages import Progress, Report, Resume, StepDone
from oobleckd.protocol.nodemessages import DeviceUp, LastWords
from oobleckd.protocol.parts import Counters, DeviceInfo
from oobleckd.worker.device.agent_link import DeviceLink
from oobleckd.worker.device.process import Loading, wait_for_place
from oobleckd.worker.runtime.activity import LOOK_UP_S, ActivityPage
from oobleckd.worker.runtime.faults import hang_for_ever
from oobleckd.worker.runtime.lifeline import hold
from oobleckd.worker.transport.mailbox import Mailbox

HUNGRY = Death(OUT_OF_MEMORY, "backward", "MemoryError", "job-1", 4, memory=Memory(2**30, 2**30))


def end(link: DeviceLink, death: Death) -> None:
    """End as a device does that knows why."""
    link.send_last(LastWords(death))
    os._exit(1)


def answer(device: str, message: object) -> Progress | StepDone | None:
    """What the device says to a message of the daemon."""
    match message:
        case Report():
            return Progress(device, message.epoch, Counters(), {0: (1, 2)}, {})
        case Resume():
            counters = Counters(message.epoch, message.epoch, message.epoch)
            return StepDone(
                device, "job-1", message.epoch, counters, "applied", 0.1, 1.0, 1e-3, 8, "x", 0.1, 0.1
            )
        case Inject(at="exit"):
            os._exit(7)
        case Inject(how="hang"):
            hang_for_ever()
    return None


def hang_if_first(folder: str | None) -> None:
    """For ever, in the one process that can make ``folder``."""
    if folder:
        with contextlib.suppress(FileExistsError):
            Path(folder).mkdir()
            hang_for_ever()


@click.command()
@click.option("--device")
@click.option("--kind")
@click.option("--fd", type=int)
@click.option("--run-dir")
@click.option("--bind")
@click.option("--host")
@click.option("--parent", type=int)
@click.option("--lifeline", type=(int, int))
@click.option("--activity", type=int)
@click.option("--urgent", is_flag=True)
def main(
    device: str,
    kind: str,
    fd: int,
    run_dir: str,
    bind: str,
    host: str,
    parent: int,
    lifeline: tuple[int, int],
    activity: int,
    urgent: bool,
) -> None:
    """The arguments of a device process."""
    die_with_parent(parent)
    hold(*lifeline)
    if "STANDIN_CRASH" in os.environ:
        os._exit(9)
    traits = {"born": str(os.getpid())}  # of the first in a place, and from then on of its heirs
    if not device:
        place = wait_for_place(fd, Loading(kind, Path(run_dir) / "compiled"))
        device, traits = place.device, place.before
        hang_if_first(os.environ.get("STANDIN_STUCK"))
    mailbox, shown = Mailbox(), ActivityPage(activity)
    link = DeviceLink(fd, mailbox, urgent=urgent)
    if "STANDIN_SAYS" in os.environ:
        kind, _, text = os.environ["STANDIN_SAYS"].partition(": ")
        end(link, Death(kind, "start", text, hint="mend that" if kind == TO_MEND else ""))
    address, local = f"{bind}:1", f"{run_dir}/none.sock"
    info = DeviceInfo(device, kind, "stand-in", 0, address, local, os.getpid(), traits=traits)
    link.send(DeviceUp(info))
    while True:
        shown.wait()
        mailbox.wait(LOOK_UP_S)
        for message in mailbox.controls():
            if isinstance(message, Inject) and message.at == "hunger":
                end(link, HUNGRY)
            said = answer(device, message)
            if said is not None:
                link.send(said)


if __name__ == "__main__":
    main()
