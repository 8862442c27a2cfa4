"""How evenly the tokens of a step went to the experts of each layer, in words and in a row of bars. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from oobleckd.draw.lines import LEVELS
from oobleckd.words import short

_UNEVEN = 2.0
"""A load up to which bars stay small: what is balanced looks even."""


class RoutedLayer(Protocol):
    """What the router of a layer came to in a step."""

    @property
    def layer(self) -> int:
        """Its number."""

    @property
    def load(self) -> float:
        """The tokens of the expert with most, times those of the mean."""

    @property
    def idle(self) -> int:
        """Experts without a token."""

    @property
    def aux_loss(self) -> float | None:
        """0 where the job does not ask for it, None where it is no finite number."""

    @property
    def z_loss(self) -> float | None:
        """The same."""


def said(routers: Sequence[RoutedLayer]) -> str:
    """``"load 1.31 at most (layer 4), 2 idle, aux loss 1.02"``; "" where there are none. Losses are means
    over layers, those that the job asks for.
    """
    if not routers:
        return ""
    most, idle = max(routers, key=lambda each: each.load), sum(each.idle for each in routers)
    words = [f"load {short(most.load)} at most (layer {most.layer})"]
    words += [f"{idle:,} idle"] if idle else []
    words += _mean("aux loss", [each.aux_loss for each in routers])
    words += _mean("z loss", [each.z_loss for each in routers])
    return ", ".join(words)


def bars(routers: Sequence[RoutedLayer], width: int) -> str:
    """A bar for the load of each layer, from 1 on, or for the largest of neighbours where there is less room
    than layers.
    """
    if not routers or width < 1:
        return ""
    each = -(-len(routers) // width)
    loads = [max(one.load for one in routers[at : at + each]) for at in range(0, len(routers), each)]
    top = max(_UNEVEN, *loads)
    return "".join(LEVELS[1 + round((load - 1) / (top - 1) * (len(LEVELS) - 2))] for load in loads)


def _mean(name: str, losses: Sequence[float | None]) -> list[str]:
    if not any(losses):
        return []
    finite = [loss for loss in losses if loss is not None]
    mean = short(sum(finite) / len(finite)) if len(finite) == len(losses) else "not finite"
    return [f"{name} {mean}"]
