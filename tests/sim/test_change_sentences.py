"""The sentences of the event stream: for each kind of data the first that simulated worlds with losses,
drains, checkpoints and other troubles tell, word for word.

``python -m tests.sim.test_change_sentences`` writes the page anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from oobleckd.core.events import Heard, ManifestWritten
from oobleckd.protocol.agentmessages import Hello
from oobleckd.protocol.changes import CheckpointIncomplete, Payload, StepCommitted
from oobleckd.protocol.checkpointmessages import CheckpointPart
from oobleckd.protocol.deaths import OUT_OF_MEMORY, Death, Memory
from oobleckd.protocol.messages import PROTOCOL
from oobleckd.protocol.parts import Spare
from oobleckd.protocol.requests import Control, Drain, Kill
from tests.helpers.simdevice import SimWriter
from tests.helpers.simjobs import UNPREPARED, make_job
from tests.helpers.simtext import WRONG
from tests.helpers.world import World

PAGE = Path(__file__).with_name("changes.txt")
GIB = 2**30
HUNGRY = Memory(used=15 * GIB, capacity=16 * GIB, wanted=2 * GIB)


def training(num_nodes: int, step: int = 6, **spec: object) -> World:
    world = World(1, num_nodes)
    world.run_for(3.0)
    world.submit(make_job(**{"steps": 60, "f": 1, "memory": 350, "every": 4} | spec))
    world.until_step(step)
    return world


def of_people() -> World:
    """Everything that somebody may ask for, of a job that stands still meanwhile."""
    world = training(6)
    world.ask(Control("job-1", "pause", "kim"))
    world.until_state("paused")
    world.ask(Control("job-1", "resume", "kim"))
    world.until_state("running")
    world.ask(Drain("n02", "fan", who="kim"))
    world.run(lambda: world.node("n02").state == "drained")
    world.ask(Drain("n02", undo=True, who="kim"))
    world.ask(Kill("n03", "slow", who="kim"))
    world.kill("n04")
    world.run_for(3.0)
    world.ask(Control("job-1", "cancel", "kim"))
    world.until_state("cancelled")
    return world


def of_losses() -> World:
    """Nodes die, come back, are waited for, and leave in order."""
    world = training(3, 12, memory=0, f=0, min_pipeline_nodes=3, every=20)
    world.stop_device("n02")
    world.run_for(5.0)
    world.held = True
    world.stop_device("n02")
    world.run_for(40.0)
    world.held = False
    world.run_for(5.0)
    world.add("n04")
    world.run_for(1.0)
    world.nodes["n04"].noticed("SIGTERM", 20.0)
    world.run_for(3.0)
    world.kill("n01", silent=True)
    world.run_for(5.0)
    return world


def of_deaths() -> World:
    """A device dies of what it knows, and then another one of the same."""
    world = training(6, memory=300, min_pipeline_nodes=3)
    for name in ("n02", "n05"):
        death = Death(OUT_OF_MEMORY, "backward", "out of memory", "job-1", 1, memory=HUNGRY)
        world.kill_device(name, death=death)
        world.run_for(5.0)
    return world


def of_slowness() -> World:
    world = training(8, 12, slow="drain", steps=120)
    world.nodes["n03"].slow = 3.0
    world.run_for(10.0)
    return world


def of_texts() -> World:
    """Another text lies there, and then the right one again."""
    world = training(4, policy="oobleck", steps=200)
    right = world.texts.at("n02")
    world.texts.put(WRONG)
    world.kill("n02")
    world.run_for(0.3)
    world.add("n02")
    world.run_for(5.0)
    world.texts.put_back(right)
    world.run_for(10.0)
    return world


def of_checkpoints() -> World:
    """One is given up, one stays incomplete, and one is due while another is written."""
    slow, SimWriter.slow = SimWriter.slow, 20.0
    try:
        world = training(4, 12, every=1)
    finally:
        SimWriter.slow = slow
    part = CheckpointPart("n01/0", "job-1", world.job().counters, "d.partial", 0, 1, "f", 1, "00", {})
    world.daemon.feed(world.daemon.incarnation, Heard("n01", part))
    world.daemon.feed(world.daemon.incarnation, ManifestWritten("d.partial", "no such folder"))
    world.run_for(1.0)
    return world


def of_an_incomplete_one() -> World:
    world = World(1, 6)
    world.run_for(1.0)
    world.submit(steps=20, f=1, memory=350, every=4)
    world.until_step(2)
    device = world.nodes["n01"].devices["n01/0"]
    device.executor.write_checkpoint = lambda: None  # as if killed between the commit and the writing
    world.until_step(4)
    world.run_for(0.01)
    world.kill("n01")
    world.run(lambda: bool(world.told(CheckpointIncomplete)))
    return world


def of_a_full_disk() -> World:
    world = training(4)
    world.disk_full = True
    world.run_for(8.0)
    world.disk_full = False
    world.run_for(8.0)
    return world


def of_preparing() -> World:
    world = World(1, 2)
    world.folders.blind.add("n01")
    world.run_for(1.0)
    world.submit(make_job(f=0, data=UNPREPARED))
    world.until_state("planning")
    return world


def of_a_spare() -> World:
    world = World(1, 1)
    world.run_for(1.0)
    said = Hello(PROTOCOL, "n9", "1", "host", True, (), Spare(7, ready=True))
    world.daemon.feed(world.daemon.incarnation, Heard("n9", said))
    world.run_for(0.1)
    return world


WORLDS: tuple[Callable[[], World], ...] = (
    of_people, of_losses, of_deaths, of_slowness, of_texts, of_checkpoints, of_an_incomplete_one,
    of_a_full_disk, of_preparing, of_a_spare,
)  # fmt: skip


def sentences() -> Iterator[str]:
    """One of each payload, of each act and of each level."""
    seen = set()
    for make in WORLDS:
        for change in make().daemon.changes:
            data = change.data
            assert isinstance(data, Payload), change
            which = type(data).__name__, change.level, getattr(data, "act", ""), getattr(data, "state", "")
            if which in seen or isinstance(data, StepCommitted):
                continue
            seen.add(which)
            yield f"{change.kind} {which[0]} {change.level}: {change.text}"


def page() -> str:
    return "".join(f"{line}\n" for line in sorted(sentences()))


def test_the_page_is_up_to_date() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), f"run `python -m {__name__}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
