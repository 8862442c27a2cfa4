"""What is wrong with GPUs, by kind."""

from __future__ import annotations

import re

import msgspec
import pytest

from oobleckd.protocol.gpus import CODES, Gpu, GpuCode, GpuLook, trouble

H100 = Gpu("NVIDIA H100", (9, 0))
SLICE = Gpu("NVIDIA H100 MIG 1g.10gb", (9, 0))
MISSING = "libcuda.so.1: cannot open shared object file: No such file or directory"
WELL = GpuLook("2.13.0+cu130", "13.0", driver=13000, module="580.65", files=2, gpus=(H100, H100))
NONE = msgspec.structs.replace(WELL, gpus=(), error=100, error_name="CUDA_ERROR_NO_DEVICE")


def but(look: GpuLook, **changes: object) -> GpuLook:
    return msgspec.structs.replace(look, **changes)


def used(*of_the_first: Gpu) -> GpuLook:
    return but(WELL, gpus=(*of_the_first, H100))


CASES: list[tuple[GpuCode, GpuLook]] = [
    ("no-torch", GpuLook()),
    ("no-torch", GpuLook(module="580.65", files=8)),
    ("cpu-build", but(WELL, torch="2.13.0+cpu", cuda="")),
    ("cpu-build", GpuLook("2.13.0+cpu")),
    ("no-driver", but(NONE, library=MISSING, module="", files=0)),
    ("no-driver", but(NONE, module="", files=0)),
    ("no-library", but(NONE, library=MISSING)),
    ("bad-library", but(NONE, library="/usr/lib/libcuda.so.1: wrong ELF class: ELFCLASS32")),
    ("bad-library", but(NONE, library="libnvidia-x.so: cannot open shared object file: No such file")),
    ("stub-library", but(NONE, error=34)),
    ("old-driver", but(WELL, driver=12040)),
    ("old-driver", but(NONE, driver=11080, error=100)),
    ("unlike-driver", but(NONE, error=803)),
    ("no-compatibility", but(NONE, error=804)),
    ("not-ready", but(NONE, error=802)),
    ("hidden", but(NONE, visible="", hidden=2)),
    ("hidden", but(NONE, visible="7", hidden=1)),
    ("not-permitted", but(NONE, closed=("/dev/nvidia0",))),
    ("not-permitted", but(NONE, error=999, closed=("/dev/nvidiactl",))),
    ("mig", but(NONE, mig=1)),
    ("none-visible", NONE),
    ("none-visible", but(NONE, files=0, visible="0")),
    ("none-visible", but(NONE, error=0)),
    ("cannot-begin", but(NONE, error=999, error_name="CUDA_ERROR_UNKNOWN")),
    ("cannot-begin", used(Gpu("NVIDIA H100", (9, 0), 0, 214, "CUDA_ERROR_ECC_UNCORRECTABLE"))),
    ("prohibited", used(Gpu("NVIDIA H100", mode=2))),
    ("prohibited", used(Gpu("NVIDIA H100", mode=2, error=46, bus="0000:17:00.0"))),
    ("exclusive", used(Gpu("NVIDIA H100", mode=3, error=46))),
    ("in-use", used(Gpu("NVIDIA H100", error=46))),
    ("no-memory", used(Gpu("NVIDIA H100", error=2))),
    ("driver-fails", GpuLook(failure="the NVIDIA driver does not answer within 60 s")),
]
"""Of a node of two devices."""


@pytest.mark.parametrize(("code", "look"), CASES)
def test_each_kind_has_its_code_and_one_sentence(code: GpuCode, look: GpuLook) -> None:
    found = trouble(look, 2)
    assert found is not None
    assert found.code == code
    assert found.hint
    assert "\n" not in found.problem
    assert not re.search(r"\. |None|\(\)|  ", found.problem + found.hint)


def test_every_code_has_its_case() -> None:
    assert {code for code, _ in CASES} | {"too-few"} == set(CODES)


@pytest.mark.parametrize(
    ("look", "wanted", "code"),
    [
        (WELL, 2, None),
        (WELL, 1, None),
        (WELL, 3, "too-few"),
        (but(WELL, gpus=(H100,), visible="0", hidden=2), 2, "too-few"),
        (but(WELL, gpus=(SLICE,), mig=1), 7, "too-few"),
        (but(WELL, driver=13020), 2, None),
        (but(WELL, cuda="12.8"), 2, None),  # an older torch on a newer driver
        (but(WELL, cuda="12.8", driver=12000), 2, None),  # minor versions of one major version fit
        (but(WELL, driver=0), 2, None),
        (but(WELL, module="", files=0), 2, None),  # WSL has a driver elsewhere
        (but(WELL, cuda="", other=True, gpus=()), 2, None),  # an AMD build: the devices say what is wrong
        (used(Gpu("NVIDIA H100", mode=3)), 2, None),  # a GPU each
        (but(WELL, gpus=(H100, Gpu("NVIDIA H100", error=214))), 1, None),  # the second one is not used
    ],
)
def test_what_will_do_and_how_many_there_are(look: GpuLook, wanted: int, code: GpuCode | None) -> None:
    found = trouble(look, wanted)
    assert (found and found.code) == code


def test_a_gpu_for_one_process_is_not_shared() -> None:
    found = trouble(used(Gpu("NVIDIA H100", mode=3)), 1, sharing=4)
    assert found is not None
    assert (found.code, found.about) == ("exclusive", ("0",))


def test_versions_and_gpus_are_named() -> None:
    old = trouble(but(WELL, driver=12040), 2)
    assert old is not None
    assert old.about == ("12.4", "13.0")
    second = trouble(but(WELL, gpus=(H100, Gpu("NVIDIA H100", error=214))), 2)
    assert second is not None
    assert second.about == ("1",)


@pytest.mark.parametrize(
    ("look", "passing"), [(NONE, False), (but(NONE, error=802), True), (used(Gpu("x", error=46)), True)]
)
def test_what_may_be_over_when_it_is_tried_again(look: GpuLook, passing: bool) -> None:
    found = trouble(look, 2)
    assert found is not None
    assert found.passing is passing
