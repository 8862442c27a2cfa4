"""Compiled layers: the same bits in every process, whatever is asked of a layer, and whoever dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from oobleckd.protocol.job import Schedule
from oobleckd.worker.models import compiled, load_spec
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.tools import reference as reference_run
from tests.helpers.compiled import compiling, digest_of
from tests.helpers.engine import World
from tests.helpers.engine_jobs import STAGES, check, random_deaths
from tests.helpers.models import CPU

BLOCK, HEAD = 1, 3
# Torch's compiler warns of what it uses itself.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is compiled here is kept nowhere else. Which instructions a CPU has is not tried by compiling
    three programs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # put back
        compiled.keep_in(tmp_path_factory.mktemp("kept"))
        yield


@pytest.mark.parametrize("layer", [pytest.param(BLOCK, marks=pytest.mark.slow), HEAD])
def test_another_process_with_a_folder_of_its_own_has_the_same_bits(tmp_path: Path, layer: int) -> None:
    here = digest_of(compiling(tmp_path), layer)
    (tmp_path / "kept").mkdir()  # with headers that are compiled already: 5 s of a core
    (tmp_path / "kept" / "headers").symlink_to(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "headers")
    command = [sys.executable, "-m", "tests.helpers.compiled", str(tmp_path), str(layer)]
    there = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout
    assert there.strip() == here
    plain = compiling(tmp_path)
    plain = msgspec.structs.replace(plain, train=msgspec.structs.replace(plain.train, compile=False))
    assert digest_of(plain, layer) != here


def test_deaths_do_not_show(tmp_path: Path) -> None:
    """Of one in a backward, and several at random: what is computed again, without some gradients or none,
    has the bits of the first time, and so has a block in every backward.
    """
    job = compiling(tmp_path)
    recorded: list[object] = []
    reference_run.run(job, tmp_path, recorded.append)
    first = World(job, STAGES, 0, tmp_path)
    first.run()
    reference = (job, first.losses, first.weights())
    assert {m.counters.step: m.loss for m in recorded if type(m).__name__ == "StepDone"} == first.losses
    died = 0
    again = msgspec.structs.replace(job, schedule=Schedule(recompute="blocks"))
    for seed in range(1, 6):
        world = World(again if seed % 2 else job, STAGES, seed, tmp_path)
        if seed == 1:
            world.nodes["b1/0"].faults.arm("backward", 2)
        else:
            random_deaths(world)
        world.run()
        check(world, reference)
        died += len(world.fired)
    assert died >= 3


def test_a_layer_has_one_graph_whatever_is_asked_of_it(tmp_path: Path) -> None:
    job = compiling(tmp_path)
    digest_of(job, BLOCK)
    before = _graphs()
    assert digest_of(job, BLOCK, backward=False) == digest_of(job, BLOCK, backward=False)
    digest_of(job, BLOCK, wants=False)
    spec = load_spec(job)
    assert _graphs() == before
    assert spec.num_layers == 4


def test_what_cannot_be_compiled_is_an_error_and_not_run_as_it_is() -> None:
    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
            return x * 2

    run = compiled.compiled(Breaks(), CPU, is_head=False)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        run(torch.ones(2))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"train\.compile: .*file"):
        compiled.keep_in(tmp_path / "file" / "in")


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
