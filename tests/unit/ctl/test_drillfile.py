"""Drills as files, and the scripts that seeds make of them."""

from pathlib import Path

import pytest

from oobleckd.ctl.drillfile import Drill, DrillError, Fault, load_drill, script_of

NODES = ("n3", "n1", "n2", "n4")
EXAMPLE = Path(__file__).parents[3] / "examples" / "drill.toml"


def drill(*faults):
    return Drill(fault=tuple(Fault(**fault) for fault in faults))


def test_the_example_is_one():
    found = load_drill(EXAMPLE)
    assert found.job.endswith(".toml")
    assert len(script_of(found, 1, [f"node-{n}" for n in range(1, 8)])) == len(found.fault)


def test_the_same_seed_makes_the_same_script_and_another_one_another():
    wanted = drill({"who": "random:2", "step": [1, 90], "after_s": [0.0, 1.0], "start": True})
    first = script_of(wanted, 7, NODES)
    assert first == script_of(wanted, 7, sorted(NODES))
    assert len({script_of(wanted, seed, NODES) for seed in range(10)}) == 10
    (act,) = first
    assert 1 <= act.step <= 90
    assert 0.0 <= act.after_s <= 1.0
    assert len(set(act.nodes)) == 2


def test_who_is_gone_is_drawn_no_more():
    wanted = drill(*[{"who": "random"}] * 4)
    for seed in range(10):
        drawn = [node for act in script_of(wanted, seed, NODES) for node in act.nodes]
        assert sorted(drawn) == sorted(NODES)


@pytest.mark.parametrize("more", [{"start": True}, {"how": "hang"}, {"how": "sigstop", "for_s": 3.0}])
def test_who_comes_back_can_be_drawn_again(more):
    assert len(script_of(drill(*[{"who": "n1", **more}] * 3), 0, NODES)) == 3


def test_a_script_reads_as_a_sentence():
    fault = {"who": "n2", "how": "hang", "step": 4, "after_s": 0.5, "phase": "backward", "start": True}
    (act,) = script_of(drill(fault), 0, NODES)
    assert str(act) == "step 4 + 500 ms: hang at backward n2, started again, recovered"
    (act,) = script_of(drill({"who": "n2", "how": "sigstop", "for_s": 3, "wait": "no"}), 0, NODES)
    assert str(act) == "step 1: sigstop for 3 s n2"
    (act,) = script_of(drill({"who": "n2", "how": "device", "wait": "whole"}), 0, NODES)
    assert str(act) == "step 1: device n2, whole again"


@pytest.mark.parametrize(
    ("faults", "says", "hint"),
    [
        ([{"who": "n9"}], "fault 1: no node 'n9' is there then", "n1, n2, n3, n4"),
        ([{"who": "n1"}, {"who": "n1"}], "fault 2: no node 'n1' is there then", "n2, n3, n4"),
        ([{"who": "random:5"}], "fault 1: 5 of 4 nodes cannot be drawn", "n1"),
        ([{"who": "random:some"}], "fault 1: who = 'random:some'", "random:2"),
    ],
)
def test_a_script_that_cannot_be(faults, says, hint):
    with pytest.raises(DrillError) as caught:
        script_of(drill(*faults), 0, NODES)
    assert says in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[fault]\n", "is no TOML"),
        ("[[fault]]\nwhom = 'n1'\n", "fault[0].whom: unknown key"),
        ("[[fault]]\nhow = 'fire'\n", "fault[0].how: is 'fire'"),
        ("[[fault]]\nstep = -1\n", "a whole number of at least 0"),
        ("job = 'j'\n", "no fault"),
    ],
)
def test_a_file_that_is_none(tmp_path, text, says):
    file = tmp_path / "drill.toml"
    file.write_text(text)
    with pytest.raises(DrillError) as caught:
        load_drill(file)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)
    with pytest.raises(DrillError, match="cannot be read"):
        load_drill(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("how", "phase", "says", "hint"),
    [
        ("device", "bakward", "fault 1: no fault point 'bakward'", "backward"),
        (
            "sigkill",
            "backward",
            "fault 1: sigkill waits for no fault point",
            'how = "device" or how = "hang"',
        ),
    ],
)
def test_a_phase_that_nobody_would_reach_is_refused(tmp_path, how, phase, says, hint):
    path = tmp_path / "drill.toml"
    path.write_text(f'[[fault]]\nhow = "{how}"\nphase = "{phase}"\n')
    with pytest.raises(DrillError, match=says) as raised:
        load_drill(path)
    assert hint in raised.value.hint
