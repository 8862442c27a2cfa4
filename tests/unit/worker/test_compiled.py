"""Compiled layers: the same bits in every process, whatever is asked of a layer, and whoever dies.

A block takes the C++ compiler 18 s of a core and the head five, and another process ten to be there. So in
``make test`` the head alone is compiled, once; what is marked slow is the same with blocks, and in two
processes.
"""

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

from oobleckd.protocol.jobschedule import Schedule
from oobleckd.worker.canary.canary import kinds, sung
from oobleckd.worker.models import compiled, load_spec, spec
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.tools import reference as reference_run
from tests.helpers.compiled import compiling, digest_of
from tests.helpers.engine import World
from tests.helpers.engine_jobs import STAGES, check, random_deaths
from tests.helpers.models import CPU

BLOCK, HEAD = 1, 3
LAYERS = [pytest.param(BLOCK, marks=pytest.mark.slow), HEAD]
# Torch's compiler warns of what it uses itself.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is compiled here is kept nowhere else. Headers are not compiled for a few programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # put back
        compiled.keep_in(tmp_path_factory.mktemp("kept"))
        yield


@pytest.fixture(params=[pytest.param("all", marks=pytest.mark.slow), "head"])
def which(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which layers are compiled; those that are not run as they are."""
    if request.param == "head":
        monkeypatch.setattr(spec, "compiled", head_alone)
    return str(request.param)


def head_alone(module: nn.Module, device: torch.device, *, is_head: bool) -> compiled.Compiled | None:
    return compiled.compiled(module, device, is_head=True) if is_head else None


@pytest.mark.slow
@pytest.mark.parametrize("layer", [BLOCK, HEAD])
def test_another_process_with_a_folder_of_its_own_has_the_same_bits(tmp_path: Path, layer: int) -> None:
    here = digest_of(compiling(tmp_path), layer)
    command = [sys.executable, "-m", "tests.helpers.compiled", str(tmp_path), str(layer)]
    there = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout
    assert there.strip() == here
    plain = compiling(tmp_path)
    plain = msgspec.structs.replace(plain, train=msgspec.structs.replace(plain.train, compile=False))
    assert digest_of(plain, layer) != here


@pytest.mark.usefixtures("which")
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
    for seed in range(1, 5):
        world = World(again if seed % 2 else job, STAGES, seed, tmp_path)
        if seed == 1:
            world.nodes["b1/0"].faults.arm("backward", 2)
        else:
            random_deaths(world)
        world.run()
        check(world, reference)
        died += len(world.fired)
    assert died >= 3


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_has_one_graph_whatever_is_asked_of_it(tmp_path: Path, layer: int) -> None:
    job = compiling(tmp_path)
    digest_of(job, layer)
    before = compiled.num_graphs()
    assert digest_of(job, layer, backward=False) == digest_of(job, layer, backward=False)
    digest_of(job, layer, wants=False)
    assert compiled.num_graphs() == before > 0
    assert load_spec(job).num_layers == 4


@pytest.mark.usefixtures("which")
def test_the_canary_runs_what_is_compiled_and_compiles_nothing(tmp_path: Path) -> None:
    job = compiling(tmp_path)
    model = load_spec(job)
    for layer in kinds(model):
        if layer:
            digest_of(job, layer)
    before = compiled.num_graphs()
    first, second = sung(model, CPU), sung(model, CPU)
    assert first is not None
    assert first == second
    assert compiled.num_graphs() == before
    plain = msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, compile=False))
    eager = sung(load_spec(plain), CPU)
    assert eager is not None
    assert first.digest != eager.digest
    assert first.shape == (job.train.micro_batch, job.train.sequence)


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
