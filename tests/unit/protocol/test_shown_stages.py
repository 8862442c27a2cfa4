"""Stages of a pipeline as people see them."""

from __future__ import annotations

from oobleckd.protocol.jobviews import PipelineView
from oobleckd.protocol.nodeviews import LayerRange


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
