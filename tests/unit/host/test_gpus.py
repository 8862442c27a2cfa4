"""A look at the GPUs of a machine: a real process, a real library, stand-ins for the driver behind it and for
torch's version.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oobleckd.host import gpus
from oobleckd.protocol.gpus import GpuCode
from tests.helpers.nvidia import Machine, needs_cc

WELL = Machine()


def test_of_this_very_machine(tmp_path: Path) -> None:
    """Whatever it has: the answer is one, and CUDA is not loaded here."""
    count, trouble = gpus.usable(gpus.ALL)
    assert (count > 0) is (trouble is None)
    assert "torch" not in sys.modules or not sys.modules["torch"].cuda.is_initialized()
    # The build of torch is what decides, whatever else there is.
    environ = Machine(torch="2.13.0+cpu", cuda=None, library=False).environ(tmp_path)
    _, trouble = gpus.usable(1, environ=environ)
    assert trouble is not None
    assert (trouble.code, trouble.about) == ("cpu-build", ("2.13.0+cpu",))


@needs_cc
@pytest.mark.parametrize(
    ("machine", "devices", "expected"),
    [
        (WELL, gpus.ALL, 2),
        (WELL, 1, 1),
        (WELL.but(visible="1"), gpus.ALL, 1),
        (WELL.but(visible="1,9,0"), gpus.ALL, 1),
        (WELL.but(driver=13010), 2, 2),
        (WELL.but(modes="3,3"), 2, 2),
        (WELL.but(errors="0,46"), 1, 1),
        (WELL.but(cuda=None, hip="6.4"), 3, 3),
        (WELL.but(visible=""), 1, "hidden"),
        (WELL.but(visible="-1"), gpus.ALL, "hidden"),
        (WELL.but(visible="7"), gpus.ALL, "hidden"),
        (WELL.but(visible="0"), 2, "too-few"),
        (WELL, 3, "too-few"),
        (WELL.but(driver=12080), gpus.ALL, "old-driver"),
        (WELL.but(init=803), gpus.ALL, "unlike-driver"),
        (WELL.but(init=34), gpus.ALL, "stub-library"),
        (WELL.but(init=802), gpus.ALL, "not-ready"),
        (WELL.but(gpus=0, mig=True), gpus.ALL, "mig"),
        (WELL.but(modes="0,2"), gpus.ALL, "prohibited"),
        (WELL.but(modes="3", errors="46"), 1, "exclusive"),
        (WELL.but(errors="46"), gpus.ALL, "in-use"),
        (WELL.but(errors="0,2"), gpus.ALL, "no-memory"),
        (WELL.but(errors="214"), gpus.ALL, "cannot-begin"),
        (WELL.but(crashes=True), gpus.ALL, "driver-fails"),
    ],
)
def test_each_kind_of_machine(
    machine: Machine, devices: int, expected: int | GpuCode, tmp_path: Path
) -> None:
    count, trouble = gpus.usable(devices, environ=machine.environ(tmp_path))
    assert (trouble.code if trouble is not None else count) == expected


@needs_cc
def test_a_driver_that_hangs_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_LOOK_S", 0.3)
    _, trouble = gpus.usable(1, environ=WELL.but(hangs=True).environ(tmp_path))
    assert trouble is not None
    assert trouble.code == "driver-fails"


def test_where_nobody_can_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "PROGRAM", (str(tmp_path / "none"),))
    _, trouble = gpus.usable(1)
    assert trouble is not None
    assert trouble.code == "driver-fails"
