"""Stages of a pipeline as people see them."""

from __future__ import annotations

from oobleckd.protocol.jobviews import PipelineView
from oobleckd.protocol.nodeviews import LayerRange, held_together, together


def pipeline(*held: tuple[str, int, int], vacant: tuple[str, ...] = ()) -> PipelineView:
    nodes = tuple(dict.fromkeys(device.partition("/")[0] for device, _, _ in held))
    return PipelineView(0, nodes, tuple(LayerRange(*each) for each in held), (0, 1), vacant)


def test_devices_of_one_stage_are_one_line() -> None:
    held = [(f"a/{index}", 0, 2) for index in range(4)] + [(f"a/{index}", 2, 5) for index in range(4, 8)]
    found = pipeline(*held, ("b/0", 5, 6)).shown
    assert [stage.name for stage in found] == ["a/0-3", "a/4-7", "b/0"]
    assert [(stage.start, stage.stop) for stage in found] == [(0, 2), (2, 5), (5, 6)]
    assert found[1].devices == ("a/4", "a/5", "a/6", "a/7")
    assert not any(stage.absence for stage in found)


def test_a_device_with_two_stages_is_in_both() -> None:
    found = pipeline(("a/0", 0, 1), ("a/1", 0, 1), ("a/0", 3, 4), ("a/1", 3, 4)).shown
    assert [(stage.name, stage.start) for stage in found] == [("a/0-1", 0), ("a/0-1", 3)]


def test_a_stage_that_lacks_one_device_is_not_vacant() -> None:
    held = [("a/0", 0, 2), ("a/1", 0, 2), ("b/0", 2, 4), ("b/1", 2, 4)]
    broken, gone = pipeline(*held, vacant=("a/1", "b/0", "b/1")).shown
    assert (broken.absence, gone.absence) == ("without a/1", "vacant")


def test_what_several_devices_hold_between_them_is_said_once() -> None:
    held = [("a/0", 0, 2), ("a/1", 0, 2), ("a/2", 2, 4), ("a/3", 2, 4), ("a/5", 2, 4)]
    found = held_together([LayerRange(*each) for each in held])
    assert found == (LayerRange("a/0-1", 0, 2), LayerRange("a/2-3, a/5", 2, 4))
    alone = [LayerRange("a/0", 0, 2), LayerRange("a/1", 2, 4)]
    assert held_together(alone) == tuple(alone)


def test_neighbours_of_one_node_have_one_name() -> None:
    assert together(["a/9", "a/10", "a/11", "b/12", "c", "c/0"]) == ("a/9-11", "b/12", "c", "c/0")
    assert together([]) == ()
