"""Words and bars of how evenly tokens went to experts."""

from __future__ import annotations

from oobleckd.draw.experts import bars, said
from oobleckd.protocol.jobviews import RouterView


def routers(*loads: float, idle: int = 0, aux_loss: float | None = 0.0) -> list[RouterView]:
    return [RouterView(layer, 7, aux_loss, 0.0, load, idle) for layer, load in enumerate(loads, 1)]


def test_words() -> None:
    assert said([]) == ""
    assert said(routers(1.0, 1.3)) == "load 1.3 at most (layer 2)"
    assert (
        said(routers(2.5, 1.3, idle=2, aux_loss=1.25)) == "load 2.5 at most (layer 1), 4 idle, aux loss 1.25"
    )
    assert said(routers(2.5, aux_loss=None)) == "load 2.5 at most (layer 1)"
    mixed = [*routers(1.0, aux_loss=None), *routers(1.0, aux_loss=1.0)]
    assert said(mixed) == "load 1 at most (layer 1), aux loss not finite"


def test_bars() -> None:
    assert bars([], 10) == bars(routers(1.0), 0) == ""
    assert bars(routers(1.0, 1.5, 2.0), 10) == "▁▅█"
    assert bars(routers(1.0, 1.1), 10) == "▁▂"  # balanced looks even
    assert bars(routers(1.0, 4.0, 1.0), 10) == "▁█▁"
    assert bars(routers(1.0, 4.0, 1.0), 2) == "█▁"  # the largest of neighbours
