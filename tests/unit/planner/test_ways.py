"""The best hops through some layers, against a search through all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import pytest

from oobleckd.planner.plan import Layers, Range, Segment
from oobleckd.planner.reroute.ways import HOP_COST, Ways


@pytest.mark.parametrize("seed", range(60))
def test_the_best_hops_are_found(seed: int) -> None:
    """Where no optimal way comes back to a device: such ways are weighed hop by hop, and run otherwise."""
    dice = random.Random(seed)
    num_layers = dice.randint(1, 6)
    holdings = {"whole/0": Layers.of(Range(0, num_layers))}
    for number in range(dice.randint(1, 5)):
        start = dice.randrange(num_layers)
        holdings[f"n{number}/0"] = Layers.of(Range(start, dice.randint(start + 1, num_layers)))
    load = {device: dice.randrange(30) for device in holdings}
    work = tuple(3 * layer for layer in range(num_layers + 1))

    found = Ways(holdings, load, Range(0, num_layers)).best(load, work, num_layers)

    every = {hops: cost(hops, load, work) for hops in paths(holdings, num_layers)}
    optimal = [hops for hops, passes in every.items() if passes == min(every.values())]
    if all(len({hop.device for hop in hops}) == len(hops) for hops in optimal):
        assert found in optimal


def test_layers_are_counted_from_the_first_that_is_wanted() -> None:
    holdings = {"a/0": Layers.of(Range(0, 4)), "b/0": Layers.of(Range(2, 6))}
    ways = Ways(holdings, ["a/0", "b/0"], Range(3, 5))

    assert ways.whole
    assert ways.best({"a/0": 0, "b/0": 1}, (0, 3, 6), 2) == (Segment("b/0", Range(0, 2)),)


def test_layers_that_nobody_holds() -> None:
    assert not Ways({"a/0": Layers.of(Range(0, 2), Range(3, 4))}, ["a/0"], Range(0, 4)).whole


def test_of_devices_with_as_much_to_do_the_first_is_taken() -> None:
    holdings = dict.fromkeys(["b/0", "a/0"], Layers.of(Range(0, 2)))

    found = Ways(holdings, ["b/0", "a/0"], Range(0, 2)).best({"a/0": 4, "b/0": 4}, (0, 3, 6), 1)

    assert found == (Segment("a/0", Range(0, 2)),)


def paths(holdings: Mapping[str, Layers], stop: int, start: int = 0) -> Iterator[tuple[Segment, ...]]:
    """Every way from layer ``start`` to the last."""
    if start == stop:
        yield ()
    for device, held in holdings.items():
        for end in range(start + 1, stop + 1):
            if held.spans(Range(start, end)):
                yield from (
                    (Segment(device, Range(start, end)), *rest) for rest in paths(holdings, stop, end)
                )


def cost(hops: Sequence[Segment], load: Mapping[str, int], work: Sequence[int]) -> int:
    """The busiest device's passes, and what the hops cost."""
    busiest = max(load[hop.device] + work[hop.layers.stop] - work[hop.layers.start] for hop in hops)
    return busiest + HOP_COST * len(hops)
