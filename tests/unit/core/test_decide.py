"""The verdict over a round, case by case of docs/recovery.md ("A failure", 3)."""

import pytest

from oobleckd.core.decide import Decision, LostLayers, decide
from oobleckd.protocol.messages import Progress
from oobleckd.protocol.parts import Counters, Flags, Vote
from planner.plan import Layout, Range, Route, Segment

# Two pipelines over four layers: a/0 holds 0-1, b/0 2-3; c/0 holds 0-3. Bucket 4 ties layers 0 and 3.
FIRST = (Segment("a/0", Range(0, 2)), Segment("b/0", Range(2, 4)))
SECOND = (Segment("c/0", Range(0, 4)),)
LAYOUT = Layout(
    1,
    4,
    {"a/0": Range(0, 2), "b/0": Range(2, 4), "c/0": Range(0, 4)},
    (Route(0, 1, FIRST), Route(1, 1, FIRST), Route(2, 1, SECOND)),
)
BUCKETS = ((0,), (1,), (2,), (3,), (0, 3))


def vote(*buckets: int, **more) -> Vote:
    return Vote({b: (float(b),) for b in buckets}, more.pop("losses", {}), **more)


def answer(device: str, round_: int = 7, done=None, reduced=(), **more) -> Progress:
    return Progress(device, 2, Counters(round_, round_, round_), done or {}, tuple(reduced), **more)


def verdict(*answers: Progress, dead=("a/0",)):
    return decide(2, {a.device: a for a in answers}, LAYOUT, dead, BUCKETS, 3)


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
    assert found.donors == {0: "c/0", 1: "c/0", 4: "c/0"}
    assert {r.micro_batch: r.mask for r in found.routes} == {0: (2, 3), 1: (2, 3)}


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
