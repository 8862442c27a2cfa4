"""Which nodes a plan may use where more are here than it may have: those at work, then by zone where that
counts, then by name.
"""

from __future__ import annotations

from oobleckd.core.membership import Membership
from oobleckd.core.usable import Terms, Usable
from oobleckd.protocol.agentmessages import Hello
from oobleckd.protocol.messages import PROTOCOL
from oobleckd.protocol.parts import DeviceInfo

RINGS = (("a", "b", "c"), ("d", "e", "f"))
EAST_AND_WEST = dict.fromkeys("ac", "east") | dict.fromkeys("df", "west")


def members(nodes: str, zones: dict[str, str]) -> Membership:
    found = Membership(lease_s=1.0, link_grace_s=1.0)
    for name in nodes:
        device = DeviceInfo(f"{name}/0", "cpu", "test", 0, "", "", 0, incarnation=f"{name}.1")
        found.hello(Hello(PROTOCOL, name, f"{name}.1", name, True, (device,), zone=zones.get(name, "")), 0.0)
    return found


def chosen(nodes: str, holders: str, zones: dict[str, str], *, redundant: bool = True) -> str:
    usable = Usable(members(nodes, zones))
    rings = RINGS if redundant else ()
    return "".join(usable.under(Terms(1, 6, tuple(f"{name}/0" for name in holders), (), True, rings)))


def test_who_is_in_another_zone_than_its_neighbours_would_be_is_taken_first() -> None:
    zones = EAST_AND_WEST | {"x": "east", "y": "west", "z": "west"}
    assert chosen("acdefxyz", "acdef", zones) == "acdefy"
    assert chosen("abcdfxyz", "abcdf", zones) == "abcdfx"
    assert chosen("acdfxyz", "acdf", zones) == "acdfxy"


def test_who_has_no_zone_is_in_nobody_s() -> None:
    assert chosen("acdefxyz", "acdef", EAST_AND_WEST | {"x": "east", "z": "west"}) == "acdefy"


def test_where_all_are_as_good_and_where_nothing_is_redundant_names_decide() -> None:
    assert chosen("acdefxyz", "acdef", {}) == "acdefx"
    assert chosen("acdefxyz", "acdef", EAST_AND_WEST | dict.fromkeys("xyz", "east")) == "acdefx"
    assert (
        chosen("acdefxyz", "acdef", EAST_AND_WEST | {"x": "east", "y": "west"}, redundant=False) == "acdefx"
    )


def test_who_works_stays_whatever_its_zone() -> None:
    zones = dict.fromkeys("abcdef", "east") | dict.fromkeys("xyz", "west")
    assert chosen("abcdefxyz", "abcdef", zones) == "abcdef"


def test_who_can_compile_nothing_is_none_where_the_job_compiles() -> None:
    found = members("ab", {})
    for name, traits in {
        "a": {"device": "cpu", "torch": "2.13"},
        "b": {"device": "cpu", "C++": "g++ 12"},
    }.items():
        device = DeviceInfo(f"{name}/0", "cpu", "test", 0, "", "", 0, incarnation=f"{name}.2", traits=traits)
        found.hello(Hello(PROTOCOL, name, f"{name}.2", name, True, (device,)), 1.0)
    usable = Usable(found)
    assert usable.under(Terms(1, 0, (), (), True)) == ("a", "b")
    assert usable.under(Terms(1, 0, (), (), True, compile=True)) == ("b",)
