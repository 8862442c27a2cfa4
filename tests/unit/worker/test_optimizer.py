"""Schedule, clipping and update together are those of a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from oobleckd.protocol.learningrate import lr_at
from oobleckd.protocol.paramgroups import knobs_of
from oobleckd.worker import sums
from oobleckd.worker.models import Batch, load_spec
from oobleckd.worker.optimizers.adam import Adam
from oobleckd.worker.optimizers.rule import UpdateStep
from oobleckd.worker.state.optimizer import clip_scale
from tests.helpers.finishing import finished
from tests.helpers.models import CPU, all_layers, all_params, layered_step, small_job


def test_learning_rate_rises_then_falls() -> None:
    job = small_job(train={"steps": 101}, optimizer={"lr": 1.0, "warmup_steps": 10, "min_lr_ratio": 0.1})
    rates = [lr_at(step, job) for step in range(101)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[10] == 1.0
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 5), (3, 3), (4, 3)])
def test_learning_rate_of_short_runs(steps: int, warmup: int) -> None:
    job = small_job(train={"steps": steps}, optimizer={"lr": 1.0, "warmup_steps": warmup})
    rates = [lr_at(step, job) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)


def test_clipping() -> None:
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(4.0, 1.0) == 0.25
    assert clip_scale(4.0, 0.0) == 1.0
    assert clip_scale(0.0, 1.0) == 1.0


def test_training_follows_a_plain_loop() -> None:
    """Layers, exact sums, clipping and update together against Hugging Face and torch's own loop."""
    job = small_job("gpt2", train={"steps": 5}, optimizer={"lr": 1e-2, "clip_norm": 0.5})
    spec = load_spec(job)
    params = all_params(spec)
    model = AutoModelForCausalLM.from_config(spec.config, dtype=torch.float32).train()
    model.load_state_dict({key: param.detach() for key, param in params.items()}, strict=False)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-8, weight_decay=0.01)
    layers, keys = all_layers(spec, params), list(params)
    moments = [[torch.zeros_like(params[key].detach()) for key in keys] for _ in range(2)]
    exponents = (sums.START_EXPONENT,) * len(keys)
    total = sums.Chunked([tuple(params[key].shape) for key in keys], True, CPU)
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        total.zero_()
        plain.zero_grad()
        for _ in range(2):
            tokens = torch.randint(0, 64, (2, 8), generator=generator)
            loss, found = layered_step(spec, layers, Batch(tokens, tokens))
            total.add([found[key] for key in keys], exponents, 2)
            expected = model(input_ids=tokens, labels=tokens).loss
            (expected / 2).backward()
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        grads, figures = finished(total.tensors, exponents, 2, num_contributions=2)
        norm = math.sqrt(sum(figures.norms))
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)), rel=1e-5)
        assert norm > 0.5
        lr = lr_at(step, job)
        clipped = [grad * clip_scale(norm, 0.5) for grad in grads]
        leaves = [params[key] for key in keys]
        slots = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
        with torch.no_grad():
            Adam().update_(
                leaves, clipped, slots, UpdateStep(step, lr, 0.01, knobs_of(job.optimizer, "adamw"))
            )
        plain.param_groups[0]["lr"] = lr
        plain.step()
        exponents = figures.exponents
    for key, param in model.named_parameters():
        torch.testing.assert_close(params[key].detach(), param.detach(), rtol=0, atol=2e-5)
