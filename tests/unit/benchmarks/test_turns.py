"""Who runs when, and how it is printed."""

from benchmarks.recovery import plan_of
from benchmarks.tables import table
from benchmarks.throughput import COMPARISONS, ordered, our_name, rate, report


def systems(*layouts):
    peers = [c.peer for c in COMPARISONS if c.layout in layouts]
    return [*peers, *(our_name(layout, exact) for layout in layouts for exact in (False, True))]


def test_every_system_has_its_turn_and_ours_stand_next_to_their_peer():
    forwards = ordered(systems("1x4", "2x2"), backwards=False)
    assert sorted(forwards) == sorted(systems("1x4", "2x2"))
    assert forwards[:3] == ["oobleckd 1x4, float sums", "Schedule1F1B, 4 stages", "oobleckd 1x4, exact sums"]
    assert ordered(systems("1x4", "2x2"), backwards=True) == forwards[::-1]
    assert set(ordered(systems("2x2"), backwards=False)) == set(systems("2x2"))


def test_our_rounds_stand_around_those_of_the_peers():
    assert plan_of(["oobleckd", "torchrun"], 5, 2) == [("oobleckd", 3), ("torchrun", 2), ("oobleckd", 2)]
    assert plan_of(["oobleckd"], 5, 2) == [("oobleckd", 5)]
    assert plan_of(["torchft", "torchrun"], 5, 2) == [("torchrun", 2), ("torchft", 2)]
    assert plan_of(["oobleckd", "torchft"], 1, 1) == [("oobleckd", 1), ("torchft", 1)]


def test_rate_is_samples_over_the_time_from_commit_to_commit():
    assert rate([10.0, 10.5, 11.0]) == 2 * 16 / 1.0


def test_ratios_are_formed_within_a_round(capsys):
    names = systems("1x4")
    rates = {name: [10.0, 20.0, 40.0] for name in names} | {our_name("1x4", True): [9.0, 18.0, 40.0]}
    ratios = report(rates)["ratios"]
    assert [(r["median"], r["goal"], r["met"]) for r in ratios] == [(1.0, 1.0, True), (0.9, 0.95, False)]
    assert "missed" in capsys.readouterr().out


def test_a_table_has_aligned_columns():
    lines = table(["name", "s"], [["a", "1.0"], ["longer", "10.0"]]).splitlines()
    assert lines == ["name       s", "------  ----", "a        1.0", "longer  10.0"]
