"""What leaves the planner is checked: planted orders that cannot be run are caught, and devices get none."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pytest

from oobleckd.planner import policies
from oobleckd.planner.policies import adapt, grid, prepare
from oobleckd.planner.policy import Proposal, Setup, Situation
from oobleckd.planner.profile import HeldBesides
from oobleckd.planner.reroute.reroute import layout_of
from oobleckd.planner.schedule import Op, ScheduleError, format_ops, parse_ops
from oobleckd.planner.schedules import decoupled, written
from oobleckd.planner.schedules.decoupled import decoupled_orders, ops_of
from oobleckd.planner.schedules.jobshop import shop_of
from oobleckd.planner.schedules.routed import better
from oobleckd.planner.schedules.validator import check_waits, validate_shop
from tests.unit.planner.build import even_profile, setup_of

Ops = dict[str, tuple[Op, ...]]


def planned(setup: Setup, num_nodes: int, policy: str = "oobleck") -> Proposal:
    nodes = tuple(f"n{number}" for number in range(num_nodes))
    return adapt(policy, setup, prepare(policy, setup), Situation(nodes, {}))


def after_a_loss(setup: Setup) -> Proposal:
    """Two pipelines of two nodes, of which one has lost a node."""
    templates = prepare("slipstream", setup)
    plan = adapt("slipstream", setup, templates, Situation(("a", "b", "c", "d"), {})).plan
    assert [len(pipeline.nodes) for pipeline in plan.pipelines] == [2, 2]
    gone = plan.pipelines[0].nodes[0]
    here = tuple(node for node in plan.nodes() if node != gone)
    held = {device: layers for device, layers in plan.holdings().items() if device != f"{gone}/0"}
    running = tuple(pipeline.nodes for pipeline in plan.pipelines)
    found = adapt("slipstream", setup, templates, Situation(here, held, running))
    assert found.plan.vacant == (f"{gone}/0",)
    return found


# ---------------------------------------------------------------------- pipelines by themselves


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_text_is_that_of_the_ops_whatever_the_form(chunks: int):
    setup = setup_of(
        even_profile(6), decoupled=True, chunks=chunks, f=0, min_nodes=2, max_nodes=3, num_micro_batches=11
    )
    found = planned(setup, 7)
    assert {pipeline.chunks for pipeline in found.plan.pipelines} == {chunks}
    assert len({len(pipeline.devices) for pipeline in found.plan.pipelines}) == 2
    ops = ops_of(found.plan, decoupled_orders(found.plan, setup.profile, 0, decoupled.EFFORT_AT_ONCE))
    assert found.ops == {device: format_ops(each) for device, each in ops.items()}
    assert not found.invalid


def test_a_shape_is_checked_once_however_many_pipelines_have_it(monkeypatch: pytest.MonkeyPatch):
    checked = []
    validate = written.validate
    monkeypatch.setattr(written, "validate", lambda *args: checked.append(validate(*args)))
    setup = setup_of(even_profile(8), decoupled=True, f=0, min_nodes=4, max_nodes=4, num_micro_batches=33)
    found = planned(setup, 32)
    assert len({len(pipeline.micro_batches) for pipeline in found.plan.pipelines}) == len(checked) == 2
    assert len(found.ops) == 32


def at(device: int, order: str, orders: Sequence[str]) -> tuple[str, ...]:
    """``orders``, of which that device has another."""
    return (*orders[:device], order, *orders[device + 1 :])


LETTERS: dict[str, tuple[str, Callable[[tuple[str, ...]], tuple[str, ...]]]] = {
    "op": ("0W7 is missing", lambda orders: at(0, orders[0][:-1], orders)),
    "foreign": ("3RA8 is not asked for", lambda orders: at(3, "F" + orders[3], orders)),
    "backward": ("0I0 comes before 0F0", lambda orders: at(0, "IF" + "FIW" * 7 + "W", orders)),
    "weights": ("3W0 comes before 3I0", lambda orders: at(3, "F" + "WI" + "FIW" * 7, orders)),
    "deadlock": ("deadlock", lambda orders: at(0, "FIW" * 8, at(3, "FF" + "IWF" * 6 + "IWIW", orders))),
    "memory": ("680 bytes at its peak", lambda orders: at(0, "F" * 8 + "IW" * 8, orders)),
    "device": ("3 schedules", lambda orders: orders[:3]),
}
TIGHT = 2 * 180 + 4 * 2 * 20
"""Memory for what a stage of two layers holds, and four micro-batches in flight."""


def four_stages(**changes: bool) -> Setup:
    return setup_of(
        even_profile(8), decoupled=True, chunks=1, f=0, min_nodes=4, max_nodes=4, device_memory_bytes=TIGHT,
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize("kind", LETTERS)
@pytest.mark.parametrize("staggered", [False, True])
def test_wrong_orders_of_a_pipeline_do_not_leave(kind: str, staggered: bool, monkeypatch: pytest.MonkeyPatch):
    setup = four_stages(staggered=staggered)
    before = planned(setup, 4)
    assert before.ops.keys() == before.plan.holdings().keys()
    assert before.invalid == ""
    found, (problem, change) = decoupled.best_orders, LETTERS[kind]
    monkeypatch.setattr(decoupled, "best_orders", lambda *args: change(found(*args)))
    after = planned(setup, 4)
    assert problem in after.invalid
    assert after.ops == {}
    assert after.plan == before.plan


# ---------------------------------------------------------------------- routes that cross


def without(ops: Ops, word: str) -> Ops:
    return {device: tuple(op for op in mine if str(op) != word) for device, mine in ops.items()}


def last_first(ops: Ops, device: str, kind: str) -> Ops:
    """Its last such op with what follows it before all others."""
    mine = ops[device][:-2]
    at = max(at for at, op in enumerate(mine) if op.kind == kind)
    return ops | {device: (*mine[at:], *mine[:at], *ops[device][-2:])}


def all_forwards_first(ops: Ops, device: str) -> Ops:
    forward = [op for op in ops[device] if op.kind in {"RA", "F", "SA"}]
    return ops | {device: (*forward, *(op for op in ops[device] if op not in forward))}


def crossed(ops: Ops) -> Ops:
    """Two devices of which each waits for what the other has behind that."""
    one, other = sorted(ops)[:2]
    for device in (one, other):
        mine = ops[device]
        receives = [op for op in mine if op.kind == "RG"] or [op for op in mine if op.kind == "RA"]
        ops = ops | {device: (*receives, *(op for op in mine if op not in receives))}
    return ops


CROSSING: dict[str, tuple[str, Callable[[Ops], Ops]]] = {
    "op": ("0F0 is missing", lambda ops: without(ops, "0F0")),
    "send": ("0SA0 is missing", lambda ops: without(ops, "0SA0")),
    "twice": ("is there twice", lambda ops: ops | {min(ops): (ops[min(ops)][0], *ops[min(ops)])}),
    "deadlock": ("deadlock", crossed),
    "memory": ("bytes in flight", lambda ops: all_forwards_first(ops, min(ops))),
    "foreign": ("0F99 is not asked for", lambda ops: ops | {min(ops): (Op("F", 0, 99), *ops[min(ops)])}),
    "device": ("schedules of", lambda ops: {each: ops[each] for each in sorted(ops)[1:]}),
    "update": ("ends with", lambda ops: ops | {min(ops): ops[min(ops)][:-1]}),
}  # fmt: skip
BACKWARD = {"backward": ("comes before", lambda ops: last_first(ops, min(ops), "B"))}


def plant(monkeypatch: pytest.MonkeyPatch, where: object, change: Callable[[Ops], Ops]) -> None:
    made = where.step_ops  # type: ignore[attr-defined]
    monkeypatch.setattr(where, "step_ops", lambda *args: change(made(*args)))


@pytest.mark.parametrize("kind", CROSSING | BACKWARD)
def test_wrong_orders_of_crossing_routes_do_not_leave(kind: str, monkeypatch: pytest.MonkeyPatch):
    setup = setup_of(
        even_profile(8), f=1, min_nodes=2, max_nodes=2, num_micro_batches=16,
        device_memory_bytes=4 * 180 + 6 * 4 * 20,
    )  # fmt: skip
    monkeypatch.setattr(grid, "EFFORT_AT_ONCE", 10_000)
    before = after_a_loss(setup)
    assert before.ops.keys() == before.plan.holdings().keys()
    assert before.invalid == ""
    problem, change = (CROSSING | BACKWARD)[kind]
    plant(monkeypatch, grid, change)
    after = after_a_loss(setup)
    assert problem in after.invalid
    assert after.ops == {}
    assert after.plan == before.plan


@pytest.mark.parametrize("kind", CROSSING)
def test_wrong_orders_for_staggered_updates_do_not_leave(kind: str, monkeypatch: pytest.MonkeyPatch):
    problem, change = CROSSING[kind]
    monkeypatch.setattr(policies, "better", partial(better, effort=1))
    plant(monkeypatch, policies, change)
    after = planned(four_stages(staggered=True), 4)
    assert problem in after.invalid
    assert after.ops == {}


def test_who_waits_for_whom_is_said():
    with pytest.raises(ScheduleError, match="a at 0RG0 waits for 1SG0 of b"):
        check_waits({"a": parse_ops("0RG0 0F0 0SA0 0B0"), "b": parse_ops("1RA0 1F0 1B0 1SG0")})
    with pytest.raises(ScheduleError, match="which nobody sends"):
        check_waits({"a": parse_ops("1RA0")})


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("chunks", [1, 2])
def test_orders_leave_room_for_what_a_device_keeps_besides(chunks: int):
    # Weights and moments as they were, and what a hop has sent: for these an order left no room.
    setup = setup_of(
        even_profile(8), decoupled=True, chunks=chunks, f=0, min_nodes=4, max_nodes=4, num_micro_batches=16,
        held=HeldBesides(state_copies=0.5, device_bytes=30),
    )  # fmt: skip
    (template,) = prepare("oobleck", setup)
    limited = msgspec.structs.replace(
        setup, device_memory_bytes=max(stage.memory_bytes for stage in template.stages)
    )
    found = planned(limited, 4)
    assert {pipeline.chunks for pipeline in found.plan.pipelines} == {chunks}
    shop = shop_of(layout_of(found.plan, 1, 8), limited)
    validate_shop(shop, {device: parse_ops(text) for device, text in found.ops.items()})
