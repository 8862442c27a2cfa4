"""What the planner counts on for a device, and what it holds at its fullest moment, in whole steps of the
engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from oobleckd.core.memory import held_besides
from oobleckd.planner.costs.work import stage_works
from oobleckd.planner.plan import Range, Recompute
from oobleckd.protocol.job import Job, parse_job
from oobleckd.worker.device.measure import measure
from tests.helpers.held import MeasuredWorld
from tests.helpers.models import CPU

LLAMA = {
    "vocab_size": 300, "max_position_embeddings": 128, "hidden_size": 128, "intermediate_size": 320,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 300, "n_positions": 128, "n_embd": 128, "n_layer": 4, "n_head": 4},
    "llama": LLAMA,
    "mixtral": LLAMA | {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
}
MODES: tuple[Recompute, ...] = ("none", "selective", "blocks")
STAGES = (Range(0, 3), Range(3, 6))


def job_of(family: str, mode: Recompute, folder: Path, sequence: int) -> Job:
    """Two pipelines of two stages, as the planner would have them for f = 1."""
    text = folder / "text"
    text.write_bytes(bytes(range(32, 127)) * 400)
    return parse_job(
        {
            "name": "held",
            "model": {"family": family, "config": MODELS[family]},
            "data": {"source": "text", "path": str(text)},
            "train": {"steps": 1, "global_batch": 16, "micro_batch": 4, "sequence": sequence},
            "schedule": {"recompute": mode},
            "checkpoint": {"dir": str(folder / "checkpoints"), "every": 0},
        }
    )


def trained(family: str, mode: Recompute, folder: Path, sequence: int = 128) -> MeasuredWorld:
    stages = [(stage.start, stage.stop) for stage in STAGES]
    world = MeasuredWorld(job_of(family, mode, folder, sequence), {"a": stages, "b": stages}, folder)
    world.run()
    return world


def planned(world: MeasuredWorld, mode: Recompute) -> list[int]:
    """Bytes by stage."""
    profile = measure(world.spec, world.job, CPU)
    held = held_besides(world.job, profile)
    works = stage_works(STAGES, profile, held=held, recompute=[mode] * len(STAGES))
    return [work.peak_bytes("F" * (len(STAGES) - stage)) for stage, work in enumerate(works)]


@pytest.fixture(autouse=True)
def _first_weights_are_drawn_once() -> None:
    """Not here, where those that are kept for the next device would count."""


@pytest.mark.thin(9)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", MODELS)
def test_a_device_holds_what_is_planned_for_it_within_a_tenth(
    family: str, mode: Recompute, tmp_path: Path
) -> None:
    world = trained(family, mode, tmp_path)
    for stage, num_bytes in enumerate(planned(world, mode)):
        held = max(world.held.most[f"{pipeline}{stage}/0"] for pipeline in ("a", "b"))
        assert num_bytes == pytest.approx(held, rel=0.1), f"stage {stage}"


def test_a_mixture_that_computes_again_holds_less_and_bits_are_the_same(tmp_path: Path) -> None:
    found: dict[Recompute, tuple[int, dict[int, float], dict[str, Tensor]]] = {}
    for mode in MODES:
        folder = tmp_path / mode
        folder.mkdir()
        world = trained("mixtral", mode, folder, 32)
        found[mode] = world.held.most["a0/0"], world.losses, world.weights()
    most = {mode: held for mode, (held, _, _) in found.items()}
    assert most["blocks"] < most["selective"] < most["none"]
    _, losses, weights = found["none"]
    for _, other, others in found.values():
        assert other == losses
        assert weights.keys() == others.keys()
        assert all(weights[key].equal(others[key]) for key in weights)
