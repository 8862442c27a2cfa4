"""The round machine, driven by hand: two devices that hold the same layer, one micro-batch each.

What commands do to a device is the shell's; here they are looked at, and what a machine must be told of
their end is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from oobleckd.planner.plan import Detours, Layers, Layout, Range, Route, Segment
from oobleckd.protocol.evalrounds import EvalRounds
from oobleckd.protocol.messages import Decide, Progress
from oobleckd.protocol.parts import Counters, Flags, Vote
from oobleckd.worker.round_machine.commands import (
    BeginRound,
    CastVote,
    Command,
    CommitRound,
    Contribute,
    Distrust,
    EnterExchange,
    Give,
    Hold,
    InheritSums,
    RollBack,
    RunTask,
    SendVote,
    TakeUp,
    Tell,
    UpdateEarly,
    WriteLast,
)
from oobleckd.worker.round_machine.commit import ReplicasDisagree
from oobleckd.worker.round_machine.copies import SumCopy
from oobleckd.worker.round_machine.exchange import Contribution, Given
from oobleckd.worker.round_machine.machine import Commands, RoundMachine, Rules
from oobleckd.worker.round_machine.phases import PHASES, Phase
from oobleckd.worker.round_machine.tasks import Order, Task

A, B = "a/0", "b/0"
LAYER = Range(0, 1)
ROUTES = tuple(Route(mb, 1, (Segment(device, LAYER),)) for mb, device in enumerate((A, B)))
LAYOUT = Layout(1, 1, {A: Layers.of(LAYER), B: Layers.of(LAYER)}, ROUTES)
RULES = Rules(EvalRounds(3, 2), staggered=True, check_every=1)
"""Both make the means, of the sums of both."""
CLIPPED = {0: (100.0,)}
"""Norms that do not go through, in these tests."""


def goes_through(vote: Vote) -> bool:
    return vote.norms != CLIPPED and not (vote.nan or vote.overflow)


def machine_of(device: str = A, rules: Rules = RULES, counters: Counters | None = None) -> RoundMachine:
    """Adopted, at the boundary before its first round."""
    machine = RoundMachine(device, rules, [(0,)], goes_through)
    machine.adopt(LAYOUT, counters or Counters())
    return machine


def here(task: Task, kind: str) -> bool:
    return True


def kept(kind: str, task: Task) -> bool:
    return False


def vote_of(device: str, norms: dict[int, tuple[float, ...]] | None = None) -> Vote:
    return Vote(norms or {0: (1.0,)}, {0 if device == A else 1: 0.5})


def part(*micro_batches: int) -> Contribution:
    return Contribution({0: micro_batches})


def kinds(commands: Iterable[Command]) -> list[type]:
    return [type(command) for command in commands]


def once(machine: RoundMachine) -> Commands:
    """Ask for one piece of work, and tell the machine that it is done."""
    commands = machine.next(here, here)
    for command in commands:
        match command:
            case RunTask(kind, task, early):
                ran(machine, kind, task, early=early)
            case Contribute(bucket):
                exchange = machine.exchange
                if exchange.wants(bucket, machine.device):
                    exchange.hear(bucket, machine.device, part(*exchange.counted(bucket)[0]))
    return commands


def ran(machine: RoundMachine, kind: str, task: Task, *, early: bool) -> None:
    spec = machine.ahead if early else machine.now
    assert spec is not None
    if kind == "F":
        spec.board.ran_forward(task)
        return
    for layer in filter(task.route.wants, task.layers.layers()):
        spec.board.ledger.count(layer, task.route.micro_batch)
    spec.board.ran_backward(task)


def work(machine: RoundMachine) -> list[type]:
    """All that it does until it waits for others, or is to vote."""
    did: list[type] = []
    while commands := once(machine):
        did += kinds(commands)
        if did[-1] in {CastVote, Hold}:
            break
    return did


def reduced(machine: RoundMachine) -> RoundMachine:
    """With the present round computed, and the sums of the other device taken in."""
    other, theirs = (B, 1) if machine.device == A else (A, 0)
    work(machine)
    machine.exchange.hear(0, other, part(theirs))
    return machine


def at(phase: Phase) -> RoundMachine:
    """A device in ``phase``, in the way there that is the shortest."""
    machine = machine_of()
    if phase == "early":
        machine.predictor.saw(True)
    if phase not in {"held", "asked-held"}:
        machine.resume()
    if phase in {"voted", "early"}:
        reduced(machine).cast(vote_of(A))
    if phase in {"asked", "asked-held"}:
        machine.report(2, (), here, kept)
    assert machine.phase == phase
    return machine


def decide(epoch: int, round_: int = 0, *, commit: Vote | None = None, hold: bool = False) -> Decide:
    return Decide(A, epoch, round_, commit, (), {}, hold)


# ---------------------------------------------------------------- a round


def test_a_round_of_two_devices_from_adopt_to_commit() -> None:
    pair = {device: RoundMachine(device, RULES, [(0,)], goes_through) for device in (A, B)}
    for machine in pair.values():
        assert kinds(machine.adopt(LAYOUT, Counters())) == [BeginRound, EnterExchange]
        assert (machine.phase, once(machine)) == ("held", ())
        assert machine.resume() == ()
        assert machine.phase == "computing"
    for number, machine in enumerate(pair.values()):
        own = Task(ROUTES[number], 0)
        assert [once(machine) for _ in range(2)] == [(RunTask("F", own),), (RunTask("B", own),)]
        (other,) = set(pair) - {machine.device}
        assert once(machine) == (Contribute(0, ((other, 1),)),)
        assert once(machine) == ()  # all waits for the other's sums
    for number, (device, machine) in enumerate(pair.items()):
        (other,) = set(pair) - {device}
        machine.exchange.hear(0, other, part(1 - number))
        assert once(machine) == (CastVote(),)
        assert machine.cast(vote_of(device)) == (SendVote((other,), 1, 0, vote_of(device)),)
        assert (machine.phase, once(machine)) == ("voted", ())
    union = Vote.union([vote_of(A), vote_of(B)])
    for device, machine in pair.items():
        (other,) = set(pair) - {device}
        assert machine.commit.hear(other, 1, 0, vote_of(other))
        committed, begin, enter = once(machine)
        assert committed == CommitRound(
            Counters(), 1, union, "applied", early=False, taken_back=False, hold=False
        )
        assert (begin, enter) == (BeginRound(machine.now, begun=False), EnterExchange())
        assert (machine.phase, machine.counters) == ("computing", Counters(1, 1, 1))
        assert machine.now.counters == machine.counters


def test_no_device_commits_without_all_votes() -> None:
    machine = at("voted")
    assert not machine.commit.hear(B, 0, 0, vote_of(B))  # of an older epoch
    machine.commit.hear(B, 1, 1, vote_of(B))  # of a later round
    machine.commit.hear(B, 2, 0, vote_of(B))  # of a later epoch
    assert once(machine) == ()
    machine.commit.hear(B, 1, 0, vote_of(B))
    assert kinds(once(machine)) == [CommitRound, BeginRound, EnterExchange]


def test_replicas_that_disagree_commit_nothing() -> None:
    machine = at("voted")
    machine.commit.hear(B, 1, 0, vote_of(B, {0: (2.0,)}))
    with pytest.raises(ReplicasDisagree):
        machine.next(here, here)
    machine.stand()
    assert (machine.phase, once(machine)) == ("held", ())


# ---------------------------------------------------------------- phases


ASKED: dict[Phase, Phase] = {
    "held": "asked-held",
    "computing": "asked",
    "voted": "asked",
    "early": "asked",
    "asked": "asked",
    "asked-held": "asked-held",
}


@pytest.mark.parametrize(("phase", "asked"), ASKED.items())
def test_who_is_asked_sends_nothing_and_commits_nothing_until_the_decision(
    phase: Phase, asked: Phase
) -> None:
    machine = at(phase)
    commands = machine.report(5, (), here, kept)
    told = commands[-1]
    assert isinstance(told, Tell)
    assert isinstance(told.message, Progress)
    assert kinds(commands[:-1]) == ([RollBack] if phase == "early" else [])
    assert (machine.phase, machine.frozen, machine.answered, machine.epoch) == (asked, True, 5, 1)
    assert told.message.holding == (asked == "asked-held")
    # Whatever comes now, and whatever it still computes:
    machine.commit.hear(B, 1, 0, vote_of(B))
    machine.commit.hear(B, 5, 0, vote_of(B))
    computes = phase in {"computing", "asked"}
    assert work(machine) == ([RunTask, RunTask] if computes else [])
    assert machine.exchange.ready() == ()
    assert machine.counters == Counters()
    # And then the decision, that the round goes on:
    decided = machine.decide(decide(5))
    voted = phase in {"voted", "early"}
    assert kinds(decided) == [EnterExchange, TakeUp, *([SendVote] if voted else [])]
    assert machine.phase == ("voted" if voted else "computing")
    if voted:
        # The old vote of the other is nobody's; its new one came early, and counts.
        assert decided[-1] == SendVote((B,), 5, 0, vote_of(A))
        assert kinds(once(machine)) == [Contribute]
        assert kinds(once(machine)) == [CommitRound, BeginRound, EnterExchange]


@pytest.mark.parametrize("phase", PHASES)
def test_a_report_that_was_answered_is_not_answered_again(phase: Phase) -> None:
    machine = at(phase)
    assert machine.report(5, (), here, kept)
    before = (machine.phase, machine.answered)
    for epoch in (5, 4):
        assert machine.report(epoch, {B}, here, kept) == ()
    assert (machine.phase, machine.answered, machine.dead) == (*before, frozenset())


def test_a_decision_of_an_older_epoch_is_not_obeyed() -> None:
    machine = at("computing")
    machine.report(3, (), here, kept)
    machine.report(4, (), here, kept)
    assert machine.decide(decide(3, 1, commit=vote_of(A))) == ()
    assert (machine.phase, machine.epoch, machine.counters) == ("asked", 1, Counters())
    assert machine.decide(decide(4))
    assert (machine.phase, machine.epoch) == ("computing", 4)
    for epoch in (4, 3):  # said twice, and late
        assert machine.decide(decide(epoch, 1, commit=vote_of(A))) == ()
    assert machine.counters == Counters()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("following", PHASES)
def test_a_move_that_is_not_in_the_table_is_a_bug(phase: Phase, following: Phase) -> None:
    machine = at(phase)
    if following in PHASES[phase].then:
        machine._enter(following)
        assert machine.phase == following
    else:
        with pytest.raises(AssertionError):
            machine._enter(following)
        assert machine.phase == phase


def test_nobody_votes_who_has_answered_a_report() -> None:
    machine = reduced(at("computing"))
    machine.report(2, (), here, kept)
    assert once(machine) == ()
    machine.decide(decide(2))
    assert work(machine) == [Contribute, CastVote]  # the other may not have had it


@pytest.mark.parametrize("phase", PHASES)
def test_a_layout_is_adopted_in_every_phase_and_holds(phase: Phase) -> None:
    machine = at(phase)
    machine.report(4, {B}, here, kept)
    layout = Layout(3, 1, LAYOUT.holdings, ROUTES)
    machine.adopt(layout, Counters(7, 2, 2))
    assert (machine.phase, machine.frozen, machine.dead) == ("asked-held", True, frozenset())
    machine.adopt(Layout(4, 1, LAYOUT.holdings, ROUTES), Counters(7, 2, 2))
    assert (machine.phase, machine.frozen, machine.ahead) == ("held", False, None)
    assert (machine.fence(4, 7), once(machine)) == ("now", ())


# ---------------------------------------------------------------- the fence of sums


@pytest.mark.parametrize(
    ("epoch", "round_", "said"),
    [
        (1, 4, "now"),
        (0, 4, "old"),
        (1, 3, "old"),
        (0, 3, "old"),
        (2, 4, "later"),
        (1, 5, "later"),
        (2, 3, "later"),
        (0, 5, "later"),
    ],
)
def test_sums_are_of_now_or_old_or_later(epoch: int, round_: int, said: str) -> None:
    assert machine_of(counters=Counters(4, 1, 1)).fence(epoch, round_) == said


def test_sums_wait_while_a_decision_is_awaited_and_those_of_before_are_old_then() -> None:
    machine = at("computing")
    machine.report(2, (), here, kept)
    assert {machine.fence(epoch, 0) for epoch in (1, 2, 3)} == {"later"}
    machine.decide(decide(2))
    assert [machine.fence(epoch, 0) for epoch in (1, 2, 3)] == ["old", "now", "later"]


# ---------------------------------------------------------------- early updates


def test_who_expects_a_commit_updates_early_and_begins_the_next_round() -> None:
    machine = reduced(at("computing"))
    machine.predictor.saw(True)
    send, update = machine.cast(vote_of(A))
    assert isinstance(send, SendVote)
    assert update == UpdateEarly(machine.ahead)
    ahead = machine.ahead
    assert machine.phase == "early"
    assert ahead.counters == Counters(1, 1, 1)
    assert once(machine) == (RunTask("F", Task(ROUTES[0], 0), early=True),)
    assert once(machine) == ()  # no backward pass before the commit
    machine.commit.hear(B, 1, 0, vote_of(B))
    committed, begin, _ = once(machine)
    assert (committed.early, committed.taken_back) == (True, False)
    assert begin == BeginRound(ahead, begun=True)
    assert (machine.phase, machine.now, machine.ahead) == ("computing", ahead, None)
    assert once(machine) == (RunTask("B", Task(ROUTES[0], 0)),)


@pytest.mark.parametrize(
    "why",
    [
        "not-staggered", "last-step", "flags", "hold-next", "alone", "attempt", "nan", "overflow",
        "seen-in-vain", "seen-none",
    ],
)  # fmt: skip
def test_nobody_updates_early_where_it_would_be_taken_back_or_stop(why: str) -> None:
    rules = replace_rules(staggered=why != "not-staggered")
    counters = Counters(2, 2, 2) if why == "last-step" else Counters()
    machine = machine_of(rules=rules, counters=counters)
    machine.resume()
    if why != "seen-none":
        machine.predictor.saw(why != "seen-in-vain")
    if why in {"hold-next", "alone"}:
        machine.report(2, {B} if why == "alone" else (), here, kept)
        routes = (Route(1, 2, (Segment(A, LAYER),), mask=(0,)),) if why == "alone" else ()
        machine.decide(replace(decide(2, hold=why == "hold-next"), routes=routes))
    if why == "alone":
        work(machine)
    else:
        reduced(machine)
    if why == "attempt":  # one that only passes through here: its weight gradients are another layer's
        hops = (Segment(A, LAYER), Segment(B, Range(1, 2)))
        machine.report(2, (), here, kept)
        machine.decide(replace(decide(2), routes=(Route(1, 2, hops, mask=(1,)),)))
    if why == "flags":
        machine.flag(Flags(checkpoint=True))
    commands = machine.cast(replace(vote_of(A), nan=why == "nan", overflow=why == "overflow"))
    assert (kinds(commands), machine.phase, machine.ahead) == ([SendVote], "voted", None)


def replace_rules(*, staggered: bool) -> Rules:
    return Rules(RULES.evaluation, staggered=staggered)


def test_a_report_takes_an_early_update_back_before_it_is_answered() -> None:
    machine = at("early")
    once(machine)
    roll_back, told = machine.report(2, (), here, kept)
    assert (roll_back, type(told)) == (RollBack(), Tell)
    assert (machine.phase, machine.ahead) == ("asked", None)
    assert told.message.counters == Counters()
    assert machine.decide(decide(2))[-1] == SendVote((B,), 2, 0, vote_of(A))
    assert machine.phase == "voted"  # and not once more early


def test_a_vote_that_comes_late_takes_an_early_update_back() -> None:
    machine = at("early")
    once(machine)
    machine.commit.hear(B, 1, 0, replace(vote_of(B), nan=True))
    committed, begin, _ = once(machine)
    assert (committed.outcome, committed.early, committed.taken_back) == ("skipped", False, True)
    assert begin == BeginRound(machine.now, begun=False)
    assert (machine.phase, machine.ahead, machine.counters) == ("computing", None, Counters(1, 1, 0, 1))
    assert not machine.predictor.expects_a_commit


def test_the_round_after_one_that_did_not_go_through_has_another_name() -> None:
    """What others sent of it may be of weights that were taken back."""
    tags = []
    for norms in (None, CLIPPED):
        machine = reduced(at("computing"))
        machine.cast(vote_of(A, norms))
        machine.commit.hear(B, 1, 0, vote_of(B, norms))
        once(machine)
        assert machine.counters == Counters(1, 1, 1)
        tags.append(machine.now.tag)
    assert len(set(tags)) == 2
    ahead = at("early").ahead
    assert ahead is not None
    assert ahead.tag == tags[0]


# ---------------------------------------------------------------- stops


@pytest.mark.parametrize("who", [A, B])
def test_a_flag_of_anybody_stops_all_behind_the_round(who: str) -> None:
    machine = reduced(at("computing"))
    machine.flag(Flags(hold=who == A))
    machine.cast(vote_of(A))
    machine.commit.hear(B, 1, 0, replace(vote_of(B), flags=Flags(hold=who == B)))
    commands = once(machine)
    assert kinds(commands) == [CommitRound, BeginRound, EnterExchange, Hold]
    assert commands[0].hold
    assert (machine.phase, machine.flags, machine.counters) == ("held", Flags(), Counters(1, 1, 1))
    assert machine.resume() == ()
    assert machine.phase == "computing"


def test_a_flag_that_comes_after_the_vote_waits_for_the_next() -> None:
    machine = reduced(at("computing"))
    machine.flag(Flags(checkpoint=True))
    (send,) = machine.cast(vote_of(A), writing=True)
    assert send.vote.flags == Flags(checkpoint=True, writing=True)
    machine.flag(Flags(hold=True))
    machine.commit.hear(B, 1, 0, vote_of(B))
    once(machine)
    assert (machine.phase, machine.flags) == ("computing", Flags(hold=True))


def test_a_decision_to_hold_stops_behind_the_round_that_goes_on() -> None:
    machine = reduced(at("computing"))
    machine.report(2, (), here, kept)
    machine.decide(decide(2, hold=True))
    assert (machine.phase, machine.hold_next) == ("computing", True)
    assert work(machine) == [Contribute, CastVote]
    machine.cast(vote_of(A))
    machine.commit.hear(B, 2, 0, vote_of(B))
    assert kinds(once(machine)) == [CommitRound, BeginRound, EnterExchange, Hold]
    assert (machine.phase, machine.hold_next) == ("held", False)


@pytest.mark.parametrize("phase", PHASES)
def test_a_decision_to_hold_now_stops_at_once(phase: Phase) -> None:
    machine = at(phase)
    machine.report(5, (), here, kept)
    assert kinds(machine.decide(replace(decide(5), hold_now=True))) == [EnterExchange, TakeUp, Hold]
    assert (machine.phase, once(machine)) == ("held", ())


def test_a_decision_commits_for_who_has_not_and_goes_on_in_the_next_round() -> None:
    """Even where the votes say to hold: when to stop is the decision's now."""
    machine = at("voted")
    machine.report(2, (), here, kept)
    union = replace(Vote.union([vote_of(A), vote_of(B)]), flags=Flags(hold=True))
    commands = machine.decide(decide(2, 1, commit=union))
    assert kinds(commands) == [CommitRound, BeginRound, EnterExchange, TakeUp]
    assert (machine.phase, machine.counters, machine.epoch) == ("computing", Counters(1, 1, 1), 2)


def test_a_decision_that_commits_what_is_not_reduced_here_is_a_bug() -> None:
    machine = at("computing")
    machine.report(2, {B}, here, kept)
    with pytest.raises(AssertionError):
        machine.decide(decide(2, 1, commit=vote_of(B)))
    assert machine.counters == Counters()


@pytest.mark.parametrize("by", ["votes", "decision"])
def test_after_the_last_step_nothing_follows(by: str) -> None:
    machine = machine_of(counters=Counters(2, 2, 2))
    machine.resume()
    reduced(machine).cast(vote_of(A))
    if by == "votes":
        machine.commit.hear(B, 1, 2, vote_of(B))
        assert kinds(once(machine))[-1] == Hold
    else:
        machine.report(2, {B}, here, kept)
        commands = machine.decide(decide(2, 3, commit=vote_of(A)))
        # The dead may have had a part of the last checkpoint to write.
        assert kinds(commands) == [CommitRound, BeginRound, EnterExchange, TakeUp, WriteLast, Hold]
    assert (machine.phase, machine.finished, machine.over) == ("held", True, True)
    assert machine.resume() == (Hold(),)
    assert machine.phase == "held"


@pytest.mark.parametrize("limit", [0, 2])
def test_after_too_many_skipped_steps_in_a_row_nothing_follows(limit: int) -> None:
    machine = machine_of(rules=Rules(EvalRounds(9, 2), max_skipped=limit), counters=Counters(1, 1, 0, 1))
    machine.resume()
    reduced(machine).cast(replace(vote_of(A), nan=True))
    machine.commit.hear(B, 1, 1, vote_of(B))
    once(machine)
    assert (machine.over, machine.finished) == (limit > 0, False)
    assert machine.phase == ("held" if limit else "computing")


# ---------------------------------------------------------------- losses


def test_the_survivor_computes_what_the_dead_had_not_told_and_commits_alone() -> None:
    machine = at("computing")
    assert work(machine) == [RunTask, RunTask, Contribute]
    (told,) = machine.report(2, {B}, here, kept)
    assert (told.message.done, told.message.reduced, told.message.vote) == ({0: (0,)}, {}, None)
    assert (machine.live, machine.interrupted) == ({A}, {1})
    spliced = Route(1, 2, (Segment(A, LAYER),), mask=(0,))
    enter, take_up = machine.decide(replace(decide(2), routes=(spliced,)))
    assert enter == EnterExchange()
    assert take_up == TakeUp(frozenset({1}), {}, repairs=True)
    assert work(machine) == [RunTask, RunTask, Contribute, CastVote]
    assert machine.cast(vote_of(A)) == (SendVote((), 2, 0, vote_of(A)),)
    assert kinds(once(machine)) == [CommitRound, BeginRound, EnterExchange]


def test_work_on_what_the_dead_had_a_part_in_is_dropped_and_on_all_else_goes_on() -> None:
    machine = RoundMachine(A, RULES, [(0,)], goes_through)
    hops = (Segment(A, LAYER), Segment(B, Range(1, 2)))
    machine.adopt(
        Layout(1, 2, {A: Layers.of(LAYER), B: Layers.of(Range(1, 2))}, (ROUTES[0], Route(1, 1, hops))),
        Counters(),
    )
    machine.resume()
    (told,) = machine.report(2, {B}, here, kept)
    assert [(hop.micro_batch, hop.reached) for hop in told.message.hops] == [(1, 0)]
    assert machine.now.board.ledger.owed == {0: {0}}
    assert [command.task.route.micro_batch for _ in range(2) for command in once(machine)] == [0, 0]
    assert once(machine) == ()


def test_a_copy_of_the_dead_one_s_sums_is_inherited_and_told_of() -> None:
    machine = at("computing")
    work(machine)
    copy = SumCopy({0: (1,)}, (), (), {})
    machine.copies.held[B] = copy
    inherit, told = machine.report(2, {B}, here, kept)
    assert inherit == InheritSums(B, copy)
    assert told.message.done == {0: (0, 1)}
    machine.decide(decide(2))
    assert work(machine) == [Contribute, CastVote]


def test_who_has_heard_votes_that_disagree_says_so_when_it_is_asked() -> None:
    machine = at("voted")
    machine.commit.hear(B, 1, 0, vote_of(B, {0: (2.0,)}))
    distrust, told = machine.report(2, {B}, here, kept)
    assert isinstance(distrust, Distrust)
    assert [odd.bucket for odd in distrust.odds] == [0]
    assert isinstance(told, Tell)


def test_a_survivor_that_is_ahead_says_with_what_it_committed() -> None:
    machine = at("voted")
    machine.commit.hear(B, 1, 0, vote_of(B))
    once(machine)
    (told,) = machine.report(2, {B}, here, kept)
    progress = told.message
    assert (progress.counters, progress.vote) == (Counters(1, 1, 1), None)
    assert progress.last == Vote.union([vote_of(A), vote_of(B)])


def test_a_vote_of_before_the_report_does_not_count_after_the_decision() -> None:
    """Its sender may not have heard of the loss."""
    machine = at("voted")
    machine.commit.hear(B, 1, 0, vote_of(B))
    machine.report(2, (), here, kept)
    machine.decide(decide(2))
    assert work(machine) == [Contribute]
    machine.commit.hear(B, 2, 0, vote_of(B))
    assert kinds(once(machine)) == [CommitRound, BeginRound, EnterExchange]


@pytest.mark.parametrize("dead", [(), (B,)])
def test_the_planned_order_leads_until_somebody_is_dead(dead: tuple[str, ...]) -> None:
    routes = tuple(Route(mb, 1, (Segment(A, LAYER),)) for mb in range(2))
    order: Order = (("F", 0, 1), ("F", 0, 0), ("B", 0, 0), ("B", 0, 1))
    machine = RoundMachine(A, RULES, [(0,)], goes_through)
    machine.adopt(Layout(1, 1, LAYOUT.holdings, routes), Counters(), order)
    machine.resume()
    machine.report(2, dead, here, kept)
    machine.decide(decide(2))
    for round_ in range(2):  # this one, and those after it
        tasks = [command for _ in range(4) for command in once(machine)]
        did = tuple((each.kind, each.task.position, each.task.route.micro_batch) for each in tasks)
        assert (did == order) == (not dead)
        assert work(machine) == [Contribute, *([CastVote] if dead else [])]
        if not dead:
            machine.exchange.hear(0, B, part())
        machine.cast(vote_of(A))
        machine.commit.hear(B, 2, round_, vote_of(B))
        assert kinds(once(machine)) == [CommitRound, BeginRound, EnterExchange]


def test_detours_of_the_decision_stand_from_the_next_round_on() -> None:
    machine = at("voted")
    machine.report(2, {B}, here, kept)
    around = Route(1, 2, (Segment(A, LAYER),))
    detours = Detours(1, (around,))
    machine.decide(replace(decide(2, 1, commit=vote_of(A)), detours=detours))
    assert [task.route for task in machine.now.board.forward] == [ROUTES[0], around]
    assert machine.interrupted == frozenset()


def test_a_donor_gives_the_means_to_who_has_them_not() -> None:
    machine = reduced(at("computing"))
    machine.report(2, (), here, kept)
    machine.decide(replace(decide(2), donors={0: {A: 1}}))
    assert once(machine) == (Give(0, 1, (B,)),)
    machine = at("computing")
    machine.report(2, (), here, kept)
    machine.decide(replace(decide(2), donors={0: {B: 1}}))
    assert work(machine) == [RunTask, RunTask]
    machine.exchange.hear_means(0, B, Given(1, {A: {0: (0,)}, B: {0: (1,)}}))
    assert once(machine) == (CastVote(),)


def test_a_second_holder_makes_means_in_steps_that_are_compared_alone() -> None:
    machine = machine_of(rules=dataclasses.replace(RULES, check_every=2, staggered=False))
    machine.resume()
    for twice in (True, False, True):
        assert machine.exchange.twice == twice
        work(machine)
        assert machine.exchange.wants(0, B)  # of the one bucket it is the owner
        machine.exchange.hear(0, B, part(1))
        machine.cast(vote_of(A))
        machine.commit.hear(B, 1, machine.counters.round, vote_of(B))
        once(machine)


def test_undisturbed_steps_are_passed_over_as_if_each_had_been_voted_on() -> None:
    """For a shell without layers: counters, flags and the last vote are what rounds one by one come to."""
    alone = Layout(1, 2, {"all": Layers()}, ())
    one, many = (RoundMachine("all", Rules(EvalRounds(9, 1)), (), lambda _vote: True) for _ in range(2))
    for machine in (one, many):
        machine.adopt(alone, Counters())
        machine.resume()
        machine.flag(Flags(checkpoint=True))
    assert not many.undisturbed
    last = many.pass_over(3, Vote({}, {}))
    for _ in range(3):
        one.cast(Vote({}, {}))
        one.next(lambda *_: False, lambda *_: False)
    assert (last.step, many.counters.step, many.counters.applied) == (2, 3, 3)
    assert (one.counters.step, one.counters.applied) == (3, 3)
    assert (many.undisturbed, one.undisturbed, many.phase) == (True, True, one.phase)
    assert many.commit.last is not None
    assert many.commit.last.flags.checkpoint


def test_nobody_with_layers_or_a_hold_is_passed_over() -> None:
    machine = RoundMachine("all", Rules(EvalRounds(9, 1)), (), lambda _vote: True)
    machine.adopt(Layout(1, 2, {"all": Layers()}, ()), Counters())
    machine.resume()
    machine.flag(Flags(hold=True))
    with pytest.raises(AssertionError):
        machine.pass_over(1, Vote({}, {}))


@pytest.mark.parametrize("voted", [False, True])
def test_who_runs_and_is_told_to_goes_on(voted: bool) -> None:
    """The daemon repeats a Resume whenever a connection may have taken one along."""
    machine = machine_of()
    machine.resume()
    if voted:
        machine.cast(vote_of(A))
    phase = machine.phase
    assert machine.resume() == ()
    assert machine.phase == phase
