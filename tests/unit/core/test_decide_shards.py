"""The verdict over a round where two devices share a stage, and one of them dies."""

from __future__ import annotations

import msgspec
import pytest

from oobleckd.core.decide import Decision, Disagreement, LostLayers, Standing, Verdict, decide
from oobleckd.planner.plan import Layers, Layout, Range, Route, Segment
from oobleckd.protocol.corruption import Odd, shard_number
from oobleckd.protocol.evalrounds import EvalRounds
from oobleckd.protocol.messages import Progress
from oobleckd.protocol.parts import Counters, Vote

# Two pipelines over four layers, two lanes each: a/0-1 hold layers 0-1, b/0-1 layers 2-3, c/0-1 all.
ABOVE, BELOW, ALL = Range(2, 4), Range(0, 2), Range(0, 4)
HELD = {"a": BELOW, "b": ABOVE, "c": ALL}


def lane(rank: int, *nodes: str) -> tuple[Segment, ...]:
    return tuple(Segment(f"{node}/{rank}", HELD[node]) for node in nodes)


LAYOUT = Layout(
    1,
    4,
    {f"{node}/{rank}": Layers.of(held) for node, held in HELD.items() for rank in range(2)},
    (
        Route(0, 1, lane(0, "a", "b")),
        Route(1, 1, lane(1, "a", "b")),
        Route(2, 1, lane(0, "c")),
        Route(3, 1, lane(1, "c")),
    ),
    devices_per_stage=2,
)
BUCKETS = ((0,), (1,), (2,), (3,))
GOES_ON = Standing(go_on=True)
DONE = dict.fromkeys(range(4), (2, 3))


def answer(device: str, done: dict[int, tuple[int, ...]] | None = None, vote: Vote | None = None) -> Progress:
    return Progress(device, 2, Counters(7, 7, 7), done or {}, {}, vote=vote)


def verdict(dead: tuple[str, ...], *answers: Progress, standing: Standing = GOES_ON) -> Verdict:
    told = {device: answer(device) for device in LAYOUT.holdings if device not in dead}
    told |= {each.device: each for each in answers}
    return decide(2, told, LAYOUT, dead, BUCKETS, EvalRounds(99, 4), standing)


def test_all_lanes_of_a_broken_stage_are_computed_by_others() -> None:
    done = [answer(f"c/{rank}", DONE) for rank in range(2)]
    done += [answer(f"b/{rank}", {2: (0, 1), 3: (0, 1)}) for rank in range(2)]
    found = verdict(("a/1",), *done)
    assert isinstance(found, Decision)
    # What b's devices have in their sums stays; what a's had is computed again, also what a/0 had computed.
    assert {route.micro_batch: route.mask for route in found.routes} == {0: (0, 1), 1: (0, 1)}
    assert not any(route.touches({"a/0", "a/1"}) for route in found.routes)
    assert found.detours is not None
    assert {route.micro_batch for route in found.detours.routes} == {0, 1}
    assert not any(route.touches({"a/0", "a/1"}) for route in found.detours.routes)
    loads = [route.segments[0].device for route in found.detours.routes]
    assert sorted(loads) == ["c/0", "c/1"]  # both of the other stage's devices have a part


def test_what_several_devices_of_a_stage_have_added_is_done_once() -> None:
    parts = answer("c/0", dict.fromkeys(range(4), (2,))), answer("c/1", dict.fromkeys(range(4), (2, 3)))
    found = verdict(("a/1",), *parts)
    assert isinstance(found, Decision)
    assert {route.micro_batch for route in found.routes} == {0, 1}  # 2 and 3 are no dead device's


def test_a_second_device_of_the_same_stage_changes_no_route() -> None:
    first = verdict(("a/1",))
    assert isinstance(first, Decision)
    standing = Standing(first.detours, ("a/1",), go_on=True)
    second = verdict(("a/0", "a/1"), standing=standing)
    assert isinstance(second, Decision)
    assert second.detours is not None
    assert first.detours is not None
    assert [r.segments for r in second.detours.routes] == [r.segments for r in first.detours.routes]


def test_nobody_can_compute_where_each_stage_has_lost_a_device() -> None:
    assert verdict(("a/0", "c/1")) == LostLayers((0, 1))
    assert min(LAYOUT.copies(("a/0", "c/1"))) == 1  # shard by shard all of it lives


def voted(device: str, **changed: int) -> Progress:
    """It has heard the digests of everybody; ``changed``: what it says of its own shards."""
    rank = LAYOUT.rank(device)
    every = {shard_number(bucket, each, 4): 10 * bucket + each for bucket in range(4) for each in range(2)}
    own = {shard_number(int(name[1:]), rank, 4): digest for name, digest in changed.items()}
    norms = dict.fromkeys(range(4), (1.0,))
    return answer(device, vote=Vote(norms, {}, digests=every | own))


def test_shards_are_compared_with_those_of_the_same_rank() -> None:
    fine = [voted(device) for device in LAYOUT.holdings if device != "a/1"]
    assert isinstance(verdict(("a/1",), *fine), Decision)


@pytest.mark.parametrize(("device", "other"), [("b/1", "c/1"), ("b/0", "c/0")])
def test_a_shard_that_differs_is_of_those_who_hold_it(device: str, other: str) -> None:
    told = [voted(each) for each in LAYOUT.holdings if each not in {"a/1", device}]
    found = verdict(("a/1",), *told, voted(device, b3=99))
    rank = LAYOUT.rank(device)
    odd = Odd("state", shard_number(3, rank, 4), {device: 99, other: 30 + rank})
    assert found == Disagreement(Counters(7, 7, 7), (odd,))


def test_redundant_holders_of_the_next_stage_take_over_rank_by_rank() -> None:
    redundant = {f"b/{rank}": Layers.of(BELOW) for rank in range(2)}
    holdings = {
        device: held.and_those(redundant.get(device, Layers())) for device, held in LAYOUT.holdings.items()
    }
    layout = msgspec.structs.replace(LAYOUT, holdings=holdings, redundant=redundant)
    told = {device: answer(device) for device in layout.holdings if device != "a/0"}
    found = decide(2, told, layout, ("a/0",), BUCKETS, EvalRounds(99, 4), GOES_ON)
    assert isinstance(found, Decision)
    assert found.detours is not None
    ways = {route.micro_batch: [s.device for s in route.segments] for route in found.detours.routes}
    assert ways == {0: ["b/0", "b/0"], 1: ["b/1", "b/1"]}
