"""The verdict over a round, case by case of docs/recovery.md ("A failure", 3)."""

import random
import time

import msgspec
import pytest

from oobleckd.core.decide import Decision, Disagreement, LostLayers, Standing, decide
from oobleckd.planner.plan import Layers, Layout, Range, Route, Segment, standing_routes
from oobleckd.protocol.corruption import Odd
from oobleckd.protocol.evalrounds import EvalRounds
from oobleckd.protocol.messages import Progress
from oobleckd.protocol.parts import Counters, Flags, Vote

# Two pipelines over four layers: a/0 holds 0-1, b/0 2-3; c/0 holds 0-3. Bucket 4 ties layers 0 and 3.
FIRST = (Segment("a/0", Range(0, 2)), Segment("b/0", Range(2, 4)))
SECOND = (Segment("c/0", Range(0, 4)),)
LAYOUT = Layout(
    1,
    4,
    {"a/0": Layers.of(Range(0, 2)), "b/0": Layers.of(Range(2, 4)), "c/0": Layers.of(Range(0, 4))},
    (Route(0, 1, FIRST), Route(1, 1, FIRST), Route(2, 1, SECOND)),
)
BUCKETS = ((0,), (1,), (2,), (3,), (0, 3))
ROUNDS = EvalRounds(99, 3)


def vote(*buckets: int, **more) -> Vote:
    return Vote({b: (float(b),) for b in buckets}, more.pop("losses", {}), **more)


def answer(device: str, round_: int = 7, done=None, reduced=(), **more) -> Progress:
    """``reduced``: buckets of two slices, whole, or bucket -> its slices of which means are there."""
    slices = reduced if isinstance(reduced, dict) else dict.fromkeys(reduced, 0b11)
    told = {bucket: (here, 0b11) for bucket, here in slices.items()}
    return Progress(device, 2, Counters(round_, round_, round_), done or {}, told, **more)


def verdict(*answers: Progress, dead=("a/0",)):
    return decide(2, {a.device: a for a in answers}, LAYOUT, dead, BUCKETS, ROUNDS)


def test_lost_layers_come_before_everything():
    assert verdict(answer("b/0"), dead=("a/0", "c/0")) == LostLayers((0, 1))


def test_all_reduced_commits_with_the_union_and_holds():
    found = verdict(
        answer("b/0", vote=vote(2, 3, losses={0: 1.0}, flags=Flags(checkpoint=True))),
        answer("c/0", vote=vote(0, 1, 2, 3, 4, losses={0: 1.0, 1: 2.0}, nan=True)),
    )
    expected = vote(0, 1, 2, 3, 4, losses={0: 1.0, 1: 2.0}, nan=True, flags=Flags(checkpoint=True))
    assert found == Decision(8, expected, hold=True, hold_now=True)


def test_one_not_reduced_means_repair():
    found = verdict(
        answer("b/0", done={2: (0,), 3: (0,)}),
        answer("c/0", done={0: (2,), 1: (2,), 2: (2,), 3: (2,)}),
    )
    assert isinstance(found, Decision)
    assert (found.round, found.commit, found.hold, found.hold_now) == (7, None, True, False)
    assert {r.micro_batch: r.mask for r in found.routes} == {0: (0, 1), 1: (0, 1, 2, 3)}
    assert all(r.attempt == 2 and not r.touches({"a/0"}) for r in found.routes)


def test_reduced_buckets_are_donated_and_not_missing():
    found = verdict(answer("b/0"), answer("c/0", reduced=(0, 1, 4)))
    assert found.donors == {0: {"c/0": 0b11}, 1: {"c/0": 0b11}, 4: {"c/0": 0b11}}
    assert {r.micro_batch: r.mask for r in found.routes} == {0: (2, 3), 1: (2, 3)}


def test_slices_are_taken_from_whoever_has_them_and_a_bucket_with_one_missing_is_made_anew():
    has_some = {2: 0b01, 3: 0b01}
    found = verdict(
        answer("b/0", reduced=has_some), answer("c/0", reduced={0: 0b11, 1: 0b10, 2: 0b10, 3: 0b01})
    )
    assert found.donors == {0: {"c/0": 0b11}, 2: {"b/0": 0b01, "c/0": 0b10}}
    assert {r.mask for r in found.routes} == {(0, 1, 3)}


def test_no_slice_is_taken_from_two_and_few_give():
    found = verdict(answer("b/0", reduced={2: 0b01, 3: 0b11}), answer("c/0", reduced={2: 0b11, 3: 0b11}))
    assert found.donors == {2: {"c/0": 0b11}, 3: {"b/0": 0b11}}


def test_a_layer_with_one_of_its_buckets_undonated_is_missing():
    found = verdict(answer("b/0"), answer("c/0", reduced=(0, 1, 2, 3)))
    assert {r.mask for r in found.routes} == {(0, 3)}


def test_nothing_missing_means_no_attempt():
    everything = dict.fromkeys(range(4), (0, 1))
    found = verdict(answer("b/0"), answer("c/0", done=everything))
    assert found.routes == ()
    assert found.hold


def test_one_past_the_round_commits_it_and_the_next_is_repaired():
    found = verdict(
        answer("b/0", 7, done={2: (0,)}, reduced=(2,), vote=vote(2, 3)),
        answer("c/0", 8, done={2: (1,)}, last=vote(0, 1, 2, 3, 4)),
    )
    assert found.round == 8
    assert found.commit == vote(0, 1, 2, 3, 4)
    assert not found.hold_now
    # What b/0 reported belongs to the round before.
    assert found.donors == {}
    assert {r.micro_batch: r.mask for r in found.routes} == {0: (0, 1, 2, 3), 1: (0, 1, 3)}


def test_one_past_the_round_that_holds_keeps_everybody_at_its_boundary():
    found = verdict(answer("b/0", 7, vote=vote(2)), answer("c/0", 8, last=vote(0), holding=True))
    assert (found.round, found.hold_now, found.routes) == (8, True, ())


def test_all_holding_stay():
    found = verdict(answer("b/0", holding=True), answer("c/0", holding=True))
    assert found == Decision(7, hold=True, hold_now=True)


def test_after_a_loss_those_who_hold_join_the_repair():
    found = verdict(answer("b/0", holding=True), answer("c/0"))
    assert (found.hold, found.hold_now, len(found.routes)) == (True, False, 2)


def test_resync_goes_on_without_a_hold():
    answers = [answer(d, done={}) for d in ("a/0", "b/0", "c/0")]
    assert verdict(*answers, dead=()) == Decision(7)


def test_resync_stops_all_when_one_holds():
    answers = [answer("a/0"), answer("b/0", holding=True), answer("c/0")]
    assert verdict(*answers, dead=()) == Decision(7, hold=True, hold_now=True)


def test_an_answer_of_every_survivor_is_needed():
    with pytest.raises(AssertionError, match="every survivor"):
        verdict(answer("c/0"))


# ---------------------------------------------------------------------- the job goes on without its dead

GOES_ON = Standing(go_on=True)


def going_on(*answers: Progress, dead=("a/0",), standing=GOES_ON, epoch=2):
    return decide(epoch, {a.device: a for a in answers}, LAYOUT, dead, BUCKETS, ROUNDS, standing)


def around(found: Decision) -> dict[int, tuple[str, ...]]:
    assert found.detours is not None
    return {r.micro_batch: tuple(s.device for s in r.segments) for r in found.detours.routes}


def test_the_round_is_repaired_and_detours_stand_from_the_next():
    found = going_on(answer("b/0", done={2: (0,), 3: (0,)}), answer("c/0"))
    assert (found.round, found.hold, found.hold_now) == (7, False, False)
    assert {r.micro_batch: r.mask for r in found.routes} == {0: (0, 1), 1: (0, 1, 2, 3)}
    assert found.detours is not None
    assert (found.detours.round, found.detours.before) == (8, ())
    assert set(around(found)) == {0, 1}
    assert all(r.mask is None and r.attempt == 2 for r in found.detours.routes)
    assert [r.micro_batch for r in standing_routes(LAYOUT, found.detours, 8)] == [0, 1, 2]
    assert standing_routes(LAYOUT, found.detours, 7) == LAYOUT.routes
    assert not any(r.touches({"a/0"}) for r in standing_routes(LAYOUT, found.detours, 8))


def test_all_reduced_commits_and_the_next_round_is_repaired_from_nothing():
    found = going_on(
        answer("b/0", vote=vote(2, 3)), answer("c/0", vote=vote(0, 1, 4), reduced=(0, 1, 2, 3, 4))
    )
    assert (found.round, found.commit, found.hold_now) == (8, vote(2, 3, 0, 1, 4), False)
    assert {r.micro_batch: r.mask for r in found.routes} == {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}
    assert found.donors == {}
    assert found.detours is not None
    assert found.detours.round == 9


def test_a_hold_that_was_voted_for_is_kept():
    flags = Flags(hold=True)
    found = going_on(answer("b/0", vote=vote(2, flags=flags)), answer("c/0", vote=vote(0)))
    assert (found.round, found.hold_now) == (8, True)
    assert len(found.routes) == 2  # for when they go on
    found = going_on(answer("b/0", 7, vote=vote(2)), answer("c/0", 8, last=vote(0), holding=True))
    assert (found.round, found.hold_now, len(found.routes)) == (8, True, 2)
    found = going_on(answer("b/0", holding=True), answer("c/0", holding=True))
    assert (found.round, found.hold_now, len(found.routes)) == (7, True, 2)


def test_survivors_a_round_apart_freeze_by_the_routes_of_theirs():
    first = going_on(answer("b/0"), answer("c/0"), dead=("a/0",)).detours
    assert first is not None
    settled = Standing(first, ("a/0",), go_on=True)
    # In round 8 nothing goes over a/0 any more: a resync has nothing to repair, and makes no new detours.
    found = going_on(
        answer("b/0", 7, vote=vote(2)), answer("c/0", 8, last=vote(0)), standing=settled, epoch=3
    )
    assert found == Decision(8, vote(0))
    # In round 7, whose repair it may have interrupted, everything that did is repaired again.
    found = going_on(answer("b/0", 7), answer("c/0", 7), standing=settled, epoch=3)
    assert {r.micro_batch: r.attempt for r in found.routes} == {0: 3, 1: 3}
    assert (found.round, found.hold, found.detours) == (7, False, None)


def test_a_second_loss_is_repaired_in_the_routes_of_the_round_and_detours_are_made_anew():
    layout = Layout(
        1, 2, {d: Layers.of(Range(0, 2)) for d in ("a/0", "b/0", "c/0")},
        tuple(Route(mb, 1, (Segment(d, Range(0, 2)),)) for mb, d in enumerate(("a/0", "b/0", "c/0"))),
    )  # fmt: skip
    uses = ((0,), (1,))
    first = decide(2, {d: answer(d) for d in ("b/0", "c/0")}, layout, {"a/0"}, uses, ROUNDS, GOES_ON)
    assert isinstance(first, Decision)
    assert around(first) == {0: ("b/0",)}
    settled = Standing(first.detours, ("a/0",), go_on=True)
    second = decide(
        3, {"c/0": answer("c/0", 9, done={0: (2,), 1: (2,)})}, layout, {"a/0", "b/0"}, uses, ROUNDS, settled
    )
    assert isinstance(second, Decision)
    assert {r.micro_batch: r.mask for r in second.routes} == {0: (0, 1), 1: (0, 1)}
    assert around(second) == {0: ("c/0",), 1: ("c/0",)}
    assert second.detours is not None
    assert second.detours.before == first.detours.routes  # who is still in round 9 goes by these
    assert standing_routes(layout, second.detours, 9) == standing_routes(layout, first.detours, 9)


def test_without_go_on_the_detours_in_force_stay_until_the_new_layout():
    standing = Standing(None, (), go_on=False)
    assert going_on(answer("b/0"), answer("c/0"), standing=standing).detours is None


def test_survivors_with_different_bits_commit_nothing():
    """Each is asked about what it holds itself: of what it has only heard of others nothing is believed
    twice.
    """
    found = verdict(
        answer("b/0", vote=vote(2, 3, digests={0: 9, 2: 5, 3: 6})),
        answer("c/0", vote=vote(0, 1, 2, 3, 4, digests={0: 1, 2: 5, 3: 7})),
    )
    assert found == Disagreement(Counters(7, 7, 7), (Odd("state", 3, {"b/0": 6, "c/0": 7}),))
    found = verdict(
        answer("b/0", vote=vote(2, 3, digests={0: 9, 2: 5})),
        answer("c/0", vote=vote(0, 1, 2, 3, 4, digests={0: 1, 2: 5})),
    )
    assert isinstance(found, Decision)
    assert found.commit is not None
    assert found.commit.digests[2] == 5


# ---------------------------------------------------------------- many devices


NUM_LAYERS, NUM_PIPELINES, NUM_STAGES = 34, 8, 4
ALL_SLICES = (1 << 64) - 1


def many(rng: random.Random) -> tuple[Layout, dict[str, Progress]]:
    """Eight pipelines of four devices, one of which died when the means of random slices were with each."""
    cuts = [round(NUM_LAYERS * stage / NUM_STAGES) for stage in range(NUM_STAGES + 1)]
    segments = {
        pipeline: tuple(
            Segment(f"n{pipeline}{stage}/0", Range(cuts[stage], cuts[stage + 1]))
            for stage in range(NUM_STAGES)
        )
        for pipeline in range(NUM_PIPELINES)
    }
    routes = tuple(Route(mb, 1, segments[mb % NUM_PIPELINES]) for mb in range(64))
    held = {each.device: each.layers for of in segments.values() for each in of}
    layout = Layout(1, NUM_LAYERS, {device: Layers.of(layers) for device, layers in held.items()}, routes)
    progress = {}
    for device, layers in held.items():
        done = {layer: tuple(range(int(device[1]), 64, NUM_PIPELINES)) for layer in layers.layers()}
        reduced = {layer: (rng.getrandbits(64), ALL_SLICES) for layer in layers.layers()}
        progress[device] = Progress(device, 2, Counters(7, 7, 7), done, reduced)
    del progress["n01/0"]
    return layout, progress


def test_a_decision_over_slices_of_many_devices_takes_no_time_and_little_room():
    """32 devices, 34 layers, 64 slices: well within 5 ms of a core; reports of bitmaps."""
    layout, progress = many(random.Random(1))
    assert max(len(msgspec.msgpack.encode(each)) for each in progress.values()) < 600
    buckets = [(layer,) for layer in range(NUM_LAYERS)]
    took = []
    for _ in range(5):
        began = time.process_time()
        found = decide(2, progress, layout, ("n01/0",), buckets, EvalRounds(99, 64))
        took.append(time.process_time() - began)
    assert min(took) < 0.005
    assert isinstance(found, Decision)
    assert 10 < len(found.donors) < NUM_LAYERS
    for shares in found.donors.values():
        assert sum(shares.values()) == ALL_SLICES  # each slice from one
    assert len(msgspec.msgpack.encode(found)) < 6000
