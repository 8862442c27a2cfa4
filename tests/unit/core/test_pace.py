"""Slow devices: told from heavy work, from a slow cluster and from one slow step."""

import itertools

from oobleckd.core.pace import Paces
from oobleckd.planner.plan import Layers, Layout, Range, Route, Segment
from oobleckd.planner.profile import LayerCost, Profile

ROUND = itertools.count()
LAYERS = tuple(LayerCost("layer", 0.01, 0.02, 1, 1, 1, 1) for _ in range(6))


def paces(*cuts):
    """Pipelines of two devices each, cut at these layers; one micro-batch each."""
    routes, holdings = [], {}
    for number, cut in enumerate(cuts):
        held = {f"a{number}/0": Layers.of(Range(0, cut)), f"b{number}/0": Layers.of(Range(cut, 6))}
        holdings |= held
        routes.append(Route(number, 0, tuple(Segment(device, part) for device, part in held.items()), None))
    return Paces.of(Layout(7, 6, holdings, tuple(routes)), Profile("key", "cpu", LAYERS))


def run(found, rounds, step_s=1.0, **slower):
    """So many rounds of ``step_s``, each device as busy as its work says times its factor; what was said."""
    said = []
    for _ in range(rounds):
        number = next(ROUND)
        for device, work_s in found.work_s.items():
            busy_s = work_s * slower.get(device.partition("/")[0], 1.0) * 1.3
            said += [
                f"{slow} {news}" for slow, news in found.note(device, number, busy_s, number * step_s).items()
            ]
    return said


def test_more_work_is_not_slow():
    found = paces(1, 3)
    assert found.work_s["b0/0"] == 5 * found.work_s["a0/0"]
    assert run(found, 50) == []
    assert found.layout == 7


def test_where_the_batch_grows_devices_are_compared_by_what_they_have_of_it():
    """Of one micro-batch a pipeline has nothing to do; and how slow somebody was stays known."""
    small, found = paces(3), paces(3, 3)
    assert found.after(small, same_layout=True).rounds is not small.rounds
    assert (small.micro_batches, found.micro_batches) == (1, 2)
    assert run(found, 7, b1=2.6) == []
    grown = paces(3, 3)
    grown.work_s = {device: 2 * work_s for device, work_s in grown.work_s.items()}
    assert run(grown.after(found, same_layout=True), 3, b1=2.6) == ["b1/0 is slow: 2.6 times its peers"]
    anew = paces(3, 3).after(grown, same_layout=False)
    assert (set(anew.slow), len(anew.rounds)) == ({"b1/0"}, 0)


def test_a_slow_device_is_named_once_and_again_when_it_is_well():
    found = paces(3, 3)
    assert run(found, 20, b1=2.6) == ["b1/0 is slow: 2.6 times its peers"]
    assert 2.5 < found.slow["b1/0"] < 2.7
    assert run(found, 20) == ["b1/0 is as fast as its peers again"]
    assert found.slow == {}


def test_the_slowest_of_the_newest_round_and_by_how_much():
    found = paces(1, 3)
    assert found.slowest() == ("", 0.0)
    run(found, 1, b1=1.5)
    device, factor = found.slowest()
    assert (device, round(factor, 9)) == ("b1/0", 1.5)
    run(found, 1)
    assert found.slowest()[1] == 1.0
    alone = Paces(work_s={"a0/0": 1.0})
    alone.note("a0/0", next(ROUND), 1.0, 0.0)
    assert alone.slowest() == ("", 0.0), "it has no peers"


def test_one_slow_step_a_slow_cluster_and_an_idle_device_are_nothing():
    found = paces(3, 3)
    assert run(found, 10) + run(found, 1, a0=50.0) + run(found, 10) == []
    assert run(found, 20, a0=3.0, b0=3.0, a1=3.0, b1=3.0) == []
    assert found.note("spare/0", next(ROUND), 1.0, 0.0) == {}


def test_a_round_that_one_device_never_told_is_left_out():
    found = paces(3, 3)
    assert found.note("a0/0", next(ROUND), 1.0, 0.0) == {}
    assert run(found, 20, b1=3.0) == ["b1/0 is slow: 3.0 times its peers"]
    assert found.telling == {}


def test_what_does_not_last_is_not_said_however_many_steps_it_takes():
    """Steps of 2 ms, and another program takes the core now and then for as long as a thousand of them."""
    found = paces(3, 3)
    for _ in range(3):
        assert run(found, 600, step_s=0.002, b1=3.0) + run(found, 100, step_s=0.002) == []
        assert found.slow == {}
    assert len(run(found, 4000, step_s=0.002, b1=3.0)) == 1
    for _ in range(3):
        assert run(found, 1000, step_s=0.002) + run(found, 100, step_s=0.002, b1=3.0) == []
    assert run(found, 4000, step_s=0.002) == ["b1/0 is as fast as its peers again"]
