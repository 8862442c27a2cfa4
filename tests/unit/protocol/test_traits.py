"""In what devices differ, by name."""

from __future__ import annotations

from oobleckd.protocol.traits import (
    CANARY,
    Traits,
    alike,
    between,
    differences,
    lacking,
    no_compiler,
    nodes_of,
)

USUAL = {"device": "NVIDIA H200", "transformers": "5.23.0", "driver": "580.65"}


def test_alike() -> None:
    assert differences({}) == ()
    assert differences({"a/0": USUAL, "b/0": dict(USUAL)}) == ()


def test_the_odd_one_is_named_with_what_is_odd() -> None:
    odd = USUAL | {"transformers": "5.24.1", "driver": "575.51"}
    (found,) = differences({"a/0": odd, "b/0": USUAL, "c/0": USUAL})
    assert (found.devices, found.usual) == (("a/0",), "b/0")
    assert str(found) == "a/0 differs from b/0 in driver 575.51 != 580.65, transformers 5.24.1 != 5.23.0"
    assert nodes_of([found]) == ("a",)


def test_of_equal_groups_the_first_is_the_usual_one() -> None:
    (found,) = differences({"b/0": {"device": "cpu"}, "a/0": {"device": "NVIDIA H200"}})
    assert (found.devices, found.usual) == (("b/0",), "a/0")


def test_many_are_not_all_named() -> None:
    many = {f"n{index}/0": {"device": "cpu"} for index in range(6)}
    (found,) = differences({f"m{index}/0": USUAL for index in range(7)} | many)
    assert str(found).startswith("n0/0, n1/0, n2/0 and 3 more differ from m0/0 in device cpu != NVIDIA H200")


def test_what_only_one_of_them_has() -> None:
    assert between({"MKL_CBWR": "AVX2"}, {}) == {"MKL_CBWR": ("AVX2", "none")}


def test_who_can_compile() -> None:
    assert no_compiler({"device": "cpu", "C++": "g++ 12", "torch": "2.13"}) == ""
    assert no_compiler({"device": "cpu", "torch": "2.13"}) == "no C++ compiler (g++)"
    assert no_compiler(USUAL | {"C++": "g++ 12", "triton": "3.7"}) == ""
    assert no_compiler(USUAL | {"C++": "g++ 12"}) == "no Triton"
    assert no_compiler({"device": "cpu, torch 2.11"}) == ""  # of an older worker, that says no more


def test_the_first_that_cannot_is_named() -> None:
    assert lacking({"a": "", "b": "no Triton"}, ["b"]) == ""
    assert lacking({"b": "no Triton", "a": ""}, []) == "train.compile: b can compile nothing: no Triton"
    assert lacking(dict.fromkeys("bcd", "no Triton"), ["b"]) == (
        "train.compile: c and 1 other node can compile nothing: no Triton"
    )


SAME, OTHER = "1f8a02bb90c4d7e1 of 5b1c9d02", "77d0a3c94e215f08 of 5b1c9d02"
ODD = USUAL | {"transformers": "5.24.1"}


def canary(said: str, traits: Traits = USUAL) -> dict[str, str]:
    return {**traits, CANARY: said}


def test_canaries_decide_whatever_versions_say() -> None:
    assert alike([canary(SAME), canary(SAME, ODD)])
    assert differences({"a/0": canary(SAME), "b/0": canary(SAME, ODD)}) == ()
    assert not alike([canary(SAME), canary(OTHER)])
    (found,) = differences({"a/0": canary(SAME), "b/0": canary(OTHER)})
    assert str(found) == f"b/0 differs from a/0 in canary {OTHER} != {SAME}"


def test_without_them_versions_decide() -> None:
    assert alike([USUAL, USUAL])
    assert not alike([USUAL, ODD])
    assert alike([USUAL, canary(SAME)])  # one has had no job yet
    assert not alike([ODD, canary(SAME)])
    assert not alike([USUAL, canary(SAME), canary(OTHER)])


def test_canaries_of_other_jobs_are_not_compared() -> None:
    other_job = "77d0a3c94e215f08 of 00000000"
    assert alike([canary(SAME), canary(other_job)])
    assert not alike([canary(SAME), canary(other_job, ODD)])
    assert differences({"a/0": canary(SAME), "b/0": canary(other_job)}) == ()


def test_nobody_is_alike() -> None:
    assert alike([])
