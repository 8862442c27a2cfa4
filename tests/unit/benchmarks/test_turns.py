"""Who runs when, and how it is printed."""

import os
import subprocess
import sys

from benchmarks.cluster import job_of
from benchmarks.peers import shape
from benchmarks.peers.launch import ROOT
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
    assert rate([10.0, 10.5, 11.0], 16) == 2 * 16 / 1.0


def test_ratios_are_formed_within_a_round(capsys):
    names = systems("1x4")
    rates = {name: [10.0, 20.0, 40.0] for name in names} | {our_name("1x4", True): [9.0, 18.0, 40.0]}
    told, passes = report(1024, rates)
    assert [(r["median"], r["verdict"]) for r in told["ratios"]] == [(1.0, "met"), (0.9, "too low")]
    assert not passes
    assert "too low" in capsys.readouterr().out


def test_smaller_micro_batches_may_reach_less(capsys):
    names = systems("2x2")
    rates = {name: [10.0] for name in names} | {our_name("2x2", True): [9.0], "DDP, 4 replicas": [20.0]}
    told, passes = report(128, rates)
    assert [r["verdict"] for r in told["ratios"]] == ["met", "below the aim", "", ""]
    assert passes
    assert "0.95 (at least 0.9)" in capsys.readouterr().out


def test_one_kind_of_sums_is_compared_alone():
    names = ["Schedule1F1B, 4 stages", our_name("1x4", True)]
    assert ordered(names, backwards=False) == names
    told, _ = report(128, {name: [1.0, 1.0] for name in names})
    assert [r["ours"] for r in told["ratios"]] == [our_name("1x4", True)]


def test_a_micro_batch_has_its_tokens_in_every_program():
    assert all(each.num * each.sequence == tokens for tokens, each in shape.MICRO_BATCHES.items())
    job = job_of("a", steps=1, f=0, depth=1, micro_batch=shape.MICRO_BATCHES[1024])
    assert (job.train.micro_batch, job.train.sequence, job.num_micro_batches) == (1, 1024, 8)
    asked = "from benchmarks.peers import shape; print(shape.MICRO_BATCH, shape.SEQUENCE, shape.GLOBAL_BATCH)"
    environment = {**os.environ, shape.TOKENS: "1024"}
    done = subprocess.run([sys.executable, "-c", asked], env=environment, cwd=ROOT, stdout=-1, check=True)
    assert done.stdout.split() == [b"1", b"1024", b"8"]


def test_a_table_has_aligned_columns():
    lines = table(["name", "s"], [["a", "1.0"], ["longer", "10.0"]]).splitlines()
    assert lines == ["name       s", "------  ----", "a        1.0", "longer  10.0"]
