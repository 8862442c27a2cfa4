"""``doctor`` on GPUs: what an agent would say at its start, and what torch makes of those that will do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from oobleckd.ctl import gpucheck
from oobleckd.host import gpus
from oobleckd.protocol.gpus import Gpu, GpuLook
from tests.helpers.nvidia import Machine, needs_cc

OOBLECKCTL = Path(sys.executable).with_name("oobleckctl")
H100 = Gpu("NVIDIA H100", (9, 0))
WELL = GpuLook("2.13.0+cu130", "13.0", driver=13000, module="550.54.15", files=8, gpus=(H100,) * 8)
NOTHING = GpuLook("2.13.0+cpu")


@pytest.mark.parametrize(
    ("kind", "devices", "look", "level", "code"),
    [
        ("cuda", gpus.ALL, NOTHING, "fail", "cpu-build"),
        ("", gpus.ALL, NOTHING, "ok", "no-driver"),  # nobody wants one
        ("", gpus.ALL, msgspec.structs.replace(NOTHING, module="550.54.15"), "fail", "cpu-build"),
        ("cuda", 9, WELL, "fail", "too-few"),
        ("cuda", gpus.ALL, msgspec.structs.replace(WELL, gpus=(), error=100), "fail", "none-visible"),
    ],
)
def test_what_an_agent_would_say(kind: str, devices: int, look: GpuLook, level: str, code: str) -> None:
    count, (found,) = gpucheck.check(kind, devices, lambda: look)
    assert (count, found.level, found.code) == (0, level, code)


def test_nobody_looks_for_gpus_that_are_not_wanted() -> None:
    assert gpucheck.check("cpu", gpus.ALL, lambda: WELL) == (0, [])


def test_what_torch_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(text: str) -> None:
        monkeypatch.setattr(gpucheck, "_ASK_TORCH", f"print({text!r})")

    told('{"count": 8, "cuda": "13.0", "nccl": [2, 29, 7], "kernels": ["sm_80", "sm_90", "compute_90"]}')
    count, (seen,) = gpucheck.check("cuda", gpus.ALL, lambda: WELL)
    assert (count, seen.level, seen.code) == (8, "ok", "")
    assert all(part in seen.text for part in ("8", "550.54.15", "13.0", "2.29.7"))
    told('{"count": 8, "cuda": "13.0", "nccl": [], "kernels": ["sm_100", "compute_120"]}')
    (old,) = gpucheck.check("cuda", gpus.ALL, lambda: WELL)[1]
    assert (old.level, old.code, old.about) == ("fail", "no-kernels", ("0",))
    told('{"count": 0, "cuda": "", "nccl": []}')
    assert gpucheck.check("cuda", gpus.ALL, lambda: WELL)[1][0].code == "torch-sees-none"
    monkeypatch.setattr(gpucheck, "_ASK_TORCH", "raise SystemExit(1)")
    assert gpucheck.check("cuda", gpus.ALL, lambda: WELL)[1][0].code == "torch-fails"


@pytest.mark.parametrize(
    ("capability", "kernels", "can"),
    [
        ((9, 0), ["sm_90"], True),
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["compute_80"], True),
        ((6, 1), ["sm_75", "sm_90", "compute_90"], False),
        ((12, 0), ["sm_120"], True),
        ((9, 0), ["sm_90a"], True),
        ((9, 0), ["gfx942"], False),
    ],
)
def test_whether_there_are_kernels_for_a_gpu(
    capability: tuple[int, int], kernels: list[str], can: bool
) -> None:
    assert gpucheck.has_kernels(capability, kernels) is can


@needs_cc
@pytest.mark.parametrize(
    ("machine", "code"),
    [
        (Machine(driver=12040), "old-driver"),
        (Machine(visible="9"), "hidden"),
        (Machine(modes="2"), "prohibited"),
    ],
)
def test_the_verb_on_such_a_machine(machine: Machine, code: str, tmp_path: Path) -> None:
    environ = machine.environ(tmp_path) | {"OOBLECK_STATE": str(tmp_path / "s")}
    words = [str(OOBLECKCTL), "doctor", "--kind", "cuda", "-o", "json"]
    done = subprocess.run(words, capture_output=True, check=False, env=environ)
    found = msgspec.json.decode(done.stdout)["checks"]
    assert [check["code"] for check in found if check["name"] == "gpu"] == [code]
    assert done.returncode == 1
