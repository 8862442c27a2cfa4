"""What devices tell of routers, put together by the step."""

from __future__ import annotations

import math

import msgspec

from oobleckd.core import view
from oobleckd.core.config import CoreConfig
from oobleckd.core.entries import StepEntry
from oobleckd.core.machine import Machine
from oobleckd.core.routers import MAX_EXPERTS, RoutersTold
from oobleckd.core.state import JobRecord
from oobleckd.protocol.messages import StepDone
from oobleckd.protocol.parts import Counters, Outcome, RouterFigures, RouterMeans
from tests.helpers.simjobs import make_job

FIGURES = {1: RouterFigures(1.5, 2.0, 1.25, 0), 3: RouterFigures(1.0, 4.0, 2.0, 1)}


def told(
    device: str,
    step: int,
    experts: dict[int, tuple[int, ...]],
    *,
    epoch: int = 1,
    outcome: Outcome = "applied",
) -> StepDone:
    return StepDone(
        device, "job-1", epoch, Counters(step, step, step), outcome, 1.0, 1.0, 0.1, 8, "x", 0.1, 0.1,
        routers=FIGURES, experts=experts,
    )  # fmt: skip


def found(routers: RoutersTold) -> tuple[int, dict[int, tuple[int, ...]]]:
    of = routers.of("job-1")
    assert of is not None
    return of.step, of.tokens


def test_a_step_is_shown_when_all_have_told_of_it() -> None:
    routers = RoutersTold()
    assert routers.of("job-1") is None
    routers.take(told("a/0", 4, {1: (5, 3)}), 5)
    assert found(routers) == (4, {1: (5, 3)})  # there is none before it
    routers.take(told("b/0", 4, {3: (8, 0)}), 5)
    routers.take(told("a/0", 5, {1: (4, 4)}), 5)
    assert found(routers) == (4, {1: (5, 3), 3: (8, 0)})
    routers.take(told("b/0", 4, {3: (8, 0)}), 5)  # said again, of a step that is over
    routers.take(told("b/0", 5, {3: (7, 1)}), 5)
    assert found(routers) == (5, {1: (4, 4), 3: (7, 1)})


def test_a_rollback_goes_back() -> None:
    routers = RoutersTold()
    routers.take(told("a/0", 9, {1: (5, 3), 3: (8, 0)}), 5)
    routers.take(told("a/0", 4, {1: (1, 7), 3: (2, 6)}, epoch=2), 5)
    assert found(routers)[0] == 4


def test_what_cannot_be_is_not_kept() -> None:
    routers = RoutersTold()
    routers.take(told("a/0", 1, {1: (5, 3)}, outcome="repeated"), 5)
    assert routers.of("job-1") is None
    routers.take(told("a/0", 1, {1: (0,) * (MAX_EXPERTS + 1), 2: (1,), 3: (8, 0), 99: (1,)}), 5)
    assert found(routers) == (1, {3: (8, 0)})
    routers.take(told("a/0", 2, {1: (5, 3), 3: (8, 0)}), 3)  # layer 3 is none of this model
    assert found(routers) == (2, {1: (5, 3)})


def test_means_over_layers_are_kept_with_the_step() -> None:
    means = RouterMeans.over(FIGURES.values())
    assert means == RouterMeans(1.25, 3.0, 2.0)
    assert RouterMeans.over([]) is None
    entry = StepEntry(
        "job-1",
        Counters(),
        "applied",
        1,
        2.0,
        1.0,
        0.1,
        8,
        "x",
        0.1,
        9.0,
        1,
        routers=RouterMeans(math.inf, 3.0, 2.0),
    )
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=StepEntry)
    assert again == entry


def test_views() -> None:
    core = Machine(CoreConfig()).core
    job = JobRecord("job-1", make_job(), 0.0, "init", Counters(), Counters(5, 5, 5), state="running")
    assert view.router_views(core, job, tokens=True) == ()
    core.routers.take(told("a/0", 4, {1: (5, 3), 3: (8, 0)}), 5)
    one, other = view.router_views(core, job, tokens=True)
    assert (one.layer, one.step, one.load, one.idle, one.tokens) == (1, 5, 1.25, 0, (5, 3))
    assert (other.layer, other.aux_loss, other.z_loss, other.tokens) == (3, 1.0, 4.0, (8, 0))
    shown = view.job_view(core, job).routers
    assert [(each.layer, each.tokens) for each in shown] == [(1, ()), (3, ())]
