"""What devices tell of themselves: kept as it was told last, and nothing is decided by it."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from oobleckd.core import devicefigures, view
from oobleckd.core.config import CoreConfig
from oobleckd.core.events import Announce, Command, FiguresHeard, Heard, Record, Tell
from oobleckd.core.machine import Machine
from oobleckd.core.memory import planned_by_device
from oobleckd.protocol.agentmessages import FiguresTold, Goodbye, Hello, Welcome
from oobleckd.protocol.changes import CardError, Change
from oobleckd.protocol.messages import PROTOCOL
from oobleckd.protocol.nodeviews import DeviceFigures
from oobleckd.protocol.parts import CardReport, DeviceInfo
from oobleckd.protocol.xids import UNKNOWN
from tests.helpers.world import World

FALLEN = CardReport("n1/0", 90.0, "NVIDIA H100", xid=79)


def hello(node: str = "n1", incarnation: str = "1") -> Hello:
    info = DeviceInfo(f"{node}/0", "cuda", "NVIDIA H100", 2**30, "", "", 7, incarnation="a")
    return Hello(PROTOCOL, node, incarnation, "host", ready=True, devices=(info,))


def told(*reports: CardReport, device: str = "n1/0", incarnation: str = "1", **fields: object) -> FiguresTold:
    said = msgspec.structs.replace(DeviceFigures(device, 100.0, rss_bytes=5), **fields)
    return FiguresTold(incarnation, (said,), reports)


def machine() -> Machine:
    made = Machine(CoreConfig())
    made.handle(Heard("n1", hello()), 100.0)
    return made


def tell(machine: Machine, message: FiguresTold, now: float = 101.0) -> list[Command]:
    return machine.handle(FiguresHeard("n1", message), now)


def changes(commands: list[Command]) -> list[Change]:
    return [each.change for each in commands if isinstance(each, Announce)]


def shown(machine: Machine, node: str = "n1") -> tuple[DeviceFigures, ...]:
    return next(each.figures for each in view.node_views(machine.core) if each.name == node)


# --------------------------------------------------------------------------- what is kept


def test_the_view_has_what_was_told_last() -> None:
    core = machine()
    assert shown(core) == ()
    assert tell(core, told()) == []
    tell(core, told(rss_bytes=7, utilisation=0.5))
    assert shown(core) == (DeviceFigures("n1/0", 100.0, rss_bytes=7, utilisation=0.5),)


def test_figures_of_a_node_that_is_lost_or_begins_anew_vanish() -> None:
    core = machine()
    tell(core, told())
    core.handle(Heard("n1", hello(incarnation="2")), 102.0)
    assert shown(core) == ()
    tell(core, told(incarnation="1"), 102.5)
    assert shown(core) == (), "of the incarnation before"
    tell(core, told(incarnation="2"), 103.0)
    assert shown(core)
    core.handle(Heard("n1", Goodbye("2", "SIGTERM")), 104.0)
    assert shown(core) == ()


def test_of_strangers_nothing_is_kept() -> None:
    core = machine()
    tell(core, told(device="n1/9"))
    assert shown(core) == ()
    assert core.handle(FiguresHeard("n9", told(device="n9/0")), 102.0) == []


def test_what_a_node_says_is_bounded_and_does_nothing_to_a_terminal() -> None:
    core = machine()
    tell(
        core,
        told(card="\x1b[2J" + "x" * 500, throttled=("y" * 500,) * 99, xids=tuple(range(99))),
    )
    (found,) = shown(core)
    assert found.card.startswith("\\x1b[2Jxxx")
    assert len(found.card) < 100
    assert found.throttled == ("y" * devicefigures.MAX_NAME,) * devicefigures.MAX_NAMED
    assert found.xids == tuple(range(99 - devicefigures.MAX_NAMED, 99)), "the newest"


def test_the_plan_says_how_many_bytes_were_meant() -> None:
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(steps=50, memory=350)
    world.until_step(3)
    node = world.machine.core.members.nodes["n01"]
    said = FiguresTold(node.incarnation, (DeviceFigures("n01/0", world.now, used_bytes=11),))
    assert world.machine.handle(FiguresHeard("n01", said), world.now) == []
    job = world.machine.core.state.jobs["job-1"]
    assert job.plan is not None
    (found,) = shown(world.machine, "n01")
    assert found.used_bytes == 11
    assert found.planned_bytes == planned_by_device(job, job.plan)["n01/0"] > 0


# --------------------------------------------------------------------------- nothing is decided by it


def test_it_is_no_sign_of_life_and_changes_nothing_that_was_due() -> None:
    core = machine()
    node = core.core.members.nodes["n1"]
    before = (node.heard_at, core.next_deadline(), dataclasses.replace(node.lease))
    tell(core, told(), 100.1)
    assert (node.heard_at, core.next_deadline(), node.lease) == before


@pytest.mark.parametrize(
    ("wanted_s", "num_nodes", "told_s"), [(5.0, 3, 5.0), (5.0, 10_000, 20.0), (0.0, 10_000, 0.0)]
)
def test_where_there_are_many_nodes_they_tell_less_often(
    wanted_s: float, num_nodes: int, told_s: float
) -> None:
    assert devicefigures.every(wanted_s, num_nodes) == told_s


def test_a_welcome_says_how_often() -> None:
    commands = Machine(CoreConfig(figures_s=7.0)).handle(Heard("n1", hello()), 1.0)
    (welcome,) = (each.message for each in commands if isinstance(each, Tell))
    assert isinstance(welcome, Welcome)
    assert welcome.figures_s == 7.0


# --------------------------------------------------------------------------- errors of cards


def test_an_xid_is_a_change_once() -> None:
    core = machine()
    (change,) = changes(tell(core, told(FALLEN)))
    assert (change.level, change.kind, change.story) == ("error", "node", ("node:n1",))
    assert change.data == CardError(
        "n1", "n1/0", "NVIDIA H100", 79, "the card has fallen off the bus", -1, 90.0
    )
    assert tell(core, told(FALLEN)) == []
    again = msgspec.structs.replace(FALLEN, at=95.0, xid=31)
    (change,) = changes(tell(core, told(FALLEN, again)))
    assert (change.level, change.data.xid) == ("warn", 31)
    assert view.story(core.core, "node:n1")[-1].seq == change.seq
    assert core.core.devices_told.xids == {("n1/0", 79): 90.0, ("n1/0", 31): 95.0}


def test_uncorrected_memory_errors_are_a_change() -> None:
    (change,) = changes(tell(machine(), told(CardReport("n1/0", 90.0, "", ecc_uncorrected=2))))
    assert change.data == CardError("n1", "n1/0", ecc_uncorrected=2, reported_at=90.0)
    assert change.level == "error"


def test_a_daemon_that_is_started_anew_does_not_say_it_again() -> None:
    core = machine()
    recorded = [each.entry for each in tell(core, told(FALLEN)) if isinstance(each, Record)]
    restarted = Machine.restore(recorded, 200.0, CoreConfig())
    restarted.handle(Heard("n1", hello()), 200.0)
    assert tell(restarted, told(FALLEN), 201.0) == []
    later = msgspec.structs.replace(FALLEN, at=199.0)
    assert len(changes(tell(restarted, told(FALLEN, later), 202.0))) == 1


def test_an_xid_that_nobody_knows_is_an_error_all_the_same() -> None:
    (change,) = changes(tell(machine(), told(CardReport("n1/0", 90.0, xid=9999))))
    assert change.level == "error"
    assert change.data == CardError("n1", "n1/0", xid=9999, means=UNKNOWN.text, reported_at=90.0)


def test_a_flood_of_reports_is_cut_to_the_newest() -> None:
    many = tuple(CardReport("n1/0", float(at), xid=13) for at in range(500))
    found = changes(tell(machine(), told(*many)))
    assert [each.data.reported_at for each in found] == [float(at) for at in range(468, 500)]
