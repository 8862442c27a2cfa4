"""What decides the bits of a device's results, by name, and in what devices differ. Pure; a device finds out
about itself (``oobleckd.worker.device.traits``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

import msgspec

from oobleckd.planner.plan import node_of
from oobleckd.words import count

Traits = Mapping[str, str]
"""Trait -> value, both for people: "transformers" -> "5.1.0". Devices with equal traits come to
equal bits, and so do those whose canaries are the same (``alike``).
"""

KIND = "device"
"""The trait that says what the device is, such as "NVIDIA H200" or "cpu"."""
COMPILER, TRITON = "C++", "triton"
"""The traits of what torch's compiler compiles with: its version."""
CANARY = "canary"
"""The trait that says what a device came to when it computed each kind of layer of its job once
(``canary_words``). Of a device that has had no job there is none.
"""
_OF = " of "
NONE = "none"
"""How a trait is shown that a device does not have."""
_NAMED = 3  # devices, or values of a trait, in a sentence


class Difference(msgspec.Struct, frozen=True):
    """These ``devices`` differ from those that are like ``usual`` (of which there are most) in ``traits``:
    name -> theirs, the usual one.
    """

    devices: tuple[str, ...]
    usual: str
    traits: dict[str, tuple[str, str]]

    def __str__(self) -> str:
        who = ", ".join(self.devices[:_NAMED])
        more = len(self.devices) - _NAMED
        who += f" and {more} more" if more > 0 else ""
        verb = "differs" if len(self.devices) == 1 else "differ"
        return f"{who} {verb} from {self.usual} in {words(self.traits)}"


def canary_words(digest: str, of: str) -> str:
    """The value of ``CANARY``: the ``digest`` of what was computed, and ``of`` what, a digest of its own."""
    return f"{digest}{_OF}{of}"


def alike(devices: Iterable[Traits]) -> bool:
    """Whether all ``devices`` come to the same bits: by their canaries, where each has one of the same
    job; or else all their other traits are the same, and no two canaries say otherwise.
    """
    different = list({id(traits): traits for traits in devices}.values())
    identity = _identity(different)
    return len(set(map(identity, different))) <= 1


def between(one: Traits, other: Traits) -> dict[str, tuple[str, str]]:
    """Trait -> its value in ``one`` and in ``other``, where these are not the same; in name order, what the
    device is first.
    """
    names = sorted(one.keys() | other.keys(), key=lambda name: (name != KIND, name))
    found = {name: (one.get(name, NONE), other.get(name, NONE)) for name in names}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def words(differing: Mapping[str, tuple[str, str]]) -> str:
    """For a sentence: "transformers 5.1.0 != 5.2.0, driver 580.65 != 575.51"."""
    return ", ".join(f"{name} {one} != {other}" for name, (one, other) in differing.items())


def no_compiler(traits: Traits) -> str:
    """Why a device with ``traits`` can compile nothing (``train.compile``); "" where it can, or says little
    of itself, as an older one does.
    """
    if len(traits) <= 1:
        return ""
    if COMPILER not in traits:
        return "no C++ compiler (g++)"
    return "" if traits.get(KIND) == "cpu" or TRITON in traits else "no Triton"


COMPILER_HINT = (
    "install g++ there (for GPUs Triton, too) and start its worker anew, drain it, or leave train.compile out"
)


def lacking(nodes: Mapping[str, str], drained: Collection[str]) -> str:
    """Which of ``nodes`` (name -> its ``no_compiler``) keeps a job from being compiled; "" where none does.
    Those that are ``drained`` do not count.
    """
    found = sorted((name, why) for name, why in nodes.items() if why and name not in drained)
    if not found:
        return ""
    name, why = found[0]
    more = f" and {count(len(found) - 1, 'other node')}" if len(found) > 1 else ""
    return f"train.compile: {name}{more} can compile nothing: {why}"


def differences(devices: Mapping[str, Traits]) -> tuple[Difference, ...]:
    """One for each group of alike devices besides the largest (of those the one that has the first name); ()
    where all are alike.
    """
    # Thousands of devices share a few dicts (``core.membership``), and whoever looks at a job asks: each dict
    # is looked into once.
    same: dict[int, list[str]] = {}
    for device, traits in devices.items():
        same.setdefault(id(traits), []).append(device)
    if len(same) <= 1:
        return ()
    groups: dict[Hashable, list[str]] = {}
    identity = _identity([devices[names[0]] for names in same.values()])
    for names in same.values():
        groups.setdefault(identity(devices[names[0]]), []).extend(names)
    ordered = sorted(map(sorted, groups.values()), key=lambda group: (-len(group), group))
    usual = ordered[0][0]
    return tuple(
        Difference(tuple(group), usual, between(devices[group[0]], devices[usual])) for group in ordered[1:]
    )


def nodes_of(found: Sequence[Difference]) -> tuple[str, ...]:
    """The nodes of all who differ, in name order."""
    return tuple(sorted({node_of(device) for difference in found for device in difference.devices}))


def _identity(found: Collection[Traits]) -> Callable[[Traits], Hashable]:
    """What devices that come to the same bits have in common; ``found``: all traits that are looked at."""
    # A list of versions says too much or too little: a driver that changes no bit, or a library that nobody
    # thought of. What was computed says it whatever the list does. (D-exactness-017)
    digests: dict[str, set[str]] = {}
    for traits in found:
        digest, _, of = traits.get(CANARY, "").partition(_OF)
        digests.setdefault(of, set()).add(digest)
    if len(digests) == 1 and "" not in digests:
        return lambda traits: traits[CANARY]
    told = any(len(different) > 1 for of, different in digests.items() if of)
    return lambda traits: tuple(sorted(item for item in traits.items() if told or item[0] != CANARY))
