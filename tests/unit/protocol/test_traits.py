"""In what devices differ, by name."""

from __future__ import annotations

from oobleckd.protocol.traits import between, differences, lacking, no_compiler, nodes_of

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
