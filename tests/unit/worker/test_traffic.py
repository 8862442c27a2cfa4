"""How many bytes gradients and an update cost besides the passes that make them, counted in a device that
trains.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from oobleckd.protocol.job import Job
from oobleckd.worker import sums
from oobleckd.worker.optimizers import choice, plan
from oobleckd.worker.optimizers.compiled import update_library
from oobleckd.worker.optimizers.registry import rule_of
from oobleckd.worker.round.reduce import Reducer
from oobleckd.worker.sums import Fused
from oobleckd.worker.training import executor
from tests.helpers.engine import World
from tests.helpers.engine_jobs import job
from tests.helpers.kernels import kernels, update_folder
from tests.helpers.models import CPU
from tests.helpers.traffic import Counted, Traffic, counted_update

finish = sys.modules["oobleckd.worker.sums.finish"]  # the module: the package has a function of that name
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 1, "n_embd": 96, "n_head": 2, "n_positions": 16, "vocab_size": 128},
    "llama": {
        "num_hidden_layers": 1, "hidden_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 256, "vocab_size": 128, "max_position_embeddings": 16,
    },
}  # fmt: skip
MOST_A_MICRO_BATCH = 20.0
OF_AN_UPDATE = 28.0
"""A step of AdamW in any loop: parameter and moments to the processor and back, and the gradient."""
OURS = {"CPU": 24.0, "GPU": 44.0}
"""Bytes of a step besides that: the guard's look, means and norms, and clipping, of which on a CPU the write
alone is left. A few more in buckets as small as these.
"""


def model_job(tmp_path: Path, family: str) -> Job:
    """Every step is clipped, and every bucket guarded."""
    base = job(tmp_path)
    model = msgspec.structs.replace(base.model, family=family, config=MODELS[family])
    optimizer = msgspec.structs.replace(base.optimizer, clip_norm=1e-3)
    return msgspec.structs.replace(base, model=model, optimizer=optimizer)


class Meter:
    """Counts in the reducer and in the update: ``added`` bytes by additions, ``ended`` at ends of steps."""

    def __init__(self, patch: pytest.MonkeyPatch, *, squared: bool) -> None:
        self.traffic, self.patch = Traffic(), patch
        self.added = self.ended = 0
        self._deep = False
        counted = Counted(kernels(), self.traffic, squared=squared)
        patch.setattr(sums, "kernels_of", lambda _: counted)
        patch.setattr(finish, "kernels_of", lambda _: counted)
        self._watch(Reducer, "add", "added")
        for name in ("begin", "contribute_ready", "contribute", "hear", "hear_means", "look", "vote"):
            self._watch(Reducer, name, "ended")
        self._watch(executor, "apply_update", "ended")
        patch.setattr(choice, "update_library", lambda: None if squared else update_library(update_folder()))
        choice.forget()
        choice.update_of(rule_of("adamw"), "cpu")  # its trial is not counted
        patch.setattr(plan, "update_of", lambda *what: counted_update(choice.update_of(*what), self.traffic))

    def _watch(self, owner: Any, name: str, into: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._counting(into):
                return plain(*args, **kwargs)

        self.patch.setattr(owner, name, watched)

    @contextmanager
    def _counting(self, into: str) -> Iterator[None]:
        if self._deep:  # of one that counts already
            yield
            return
        self._deep, before = True, self.traffic.num_bytes
        try:
            with self.traffic:
                yield
        finally:
            self._deep = False
            setattr(self, into, getattr(self, into) + self.traffic.num_bytes - before)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("kind", OURS)
def test_bytes_a_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: str) -> None:
    meter = Meter(monkeypatch, squared=kind == "GPU")
    world = World(model_job(tmp_path, family), {"x": [(0, 3)]}, 0, tmp_path)
    world.run()
    (device,) = world.live()
    assert all(isinstance(part, Fused) for part in world.nodes[device].executor.reducer.parts.values())
    num_params = sum(math.prod(shape) for bucket in world.spec.buckets for shape in bucket.shapes)
    steps = world.job.train.steps
    added = meter.added / (num_params * steps * world.job.num_micro_batches)
    ended = meter.ended / (num_params * steps)
    assert 12.0 < added <= MOST_A_MICRO_BATCH  # the first of a step's overwrites
    choice.forget()
    assert OURS[kind] < ended - OF_AN_UPDATE < OURS[kind] + 4.0


def test_a_gradient_in_bfloat16_costs_two_bytes_less() -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        traffic = Traffic()
        total = Fused([(1000, 100)], CPU, Counted(kernels(), traffic, squared=False), guarded=True)
        grads = [torch.ones(1000, 100, dtype=dtype)]
        for _ in range(2):
            before = traffic.num_bytes
            with traffic:
                total.add(grads, (3,), 8)
        found.append((traffic.num_bytes - before) / 100_000)
    assert found == pytest.approx([20.0, 18.0], abs=0.1)
