"""What nodes cost. Owns the table that comes with the package (prices.toml), and whose price is meant."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import msgspec

from oobleckd.words import short


class Instance(msgspec.Struct, frozen=True):
    """Dollars an hour for an instance of ``devices`` devices of the kind ``device`` (a data sheet's name,
    where there is one).
    """

    device: str
    devices: int
    on_demand: float
    spot: float


class Price(msgspec.Struct, frozen=True):
    """Dollars an hour for a node, and where that is from. None: nobody said, and the table has no such
    device.
    """

    on_demand: float | None
    spot: float | None
    source: str


def instances() -> dict[str, Instance]:
    """All of the table, by name."""
    text = files("oobleckd.simulator").joinpath("prices.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Instance])


def price_of(name: str, device: str, devices_per_node: int) -> Price | None:
    """The price of a node of so many devices: its share of the instance called ``name``, or else of one with
    such devices.

    None where nobody knows. Raises KeyError for an instance that is not in the table.
    """
    table = instances()
    if not name:
        name = next((key for key, each in table.items() if each.device == device), "")
        if not name:
            return None
    found = table[name]
    share = devices_per_node / found.devices
    what = name if share == 1 else f"{short(share)} of {name}"
    return Price(found.on_demand * share, found.spot * share, what)
