"""Every family, cut into three stages, computes the bits of the undivided model of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oobleckd.planner.plan import Range
from oobleckd.worker.models import FAMILIES, load_spec
from oobleckd.worker.models.config import TIED
from tests.helpers.models import (
    DROPOUTS,
    all_layers,
    all_params,
    held_layers,
    layered_step,
    seed_like_layers,
    small_config,
    small_job,
    some_batch,
    undivided,
)

STAGES = (Range(0, 2), Range(2, 3), Range(3, 5))


def three_blocks(family: str, *, tied: bool, dropout: float) -> dict[str, Any]:
    more = dict.fromkeys(DROPOUTS, dropout)
    return small_config(family, num_hidden_layers=3, tie_word_embeddings=tied, **more)


@pytest.mark.thin(8)
@pytest.mark.parametrize(("tied", "dropout"), [(False, 0.0), (True, 0.2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_stages_compute_the_bits_of_the_undivided_model(
    family: str, tied: bool, dropout: float
) -> None:
    tied |= family in TIED
    job = small_job(family, three_blocks(family, tied=tied, dropout=dropout))
    spec = load_spec(job)
    assert spec.num_layers == STAGES[-1].stop
    layers = [layer for layers in STAGES for layer in held_layers(spec, layers)]
    batch = some_batch(spec)
    params = {spec.buckets[b].keys[i]: leaf for layer in layers for b, i, leaf in layer.params}
    model = undivided(spec, params)
    assert {id(model.get_parameter(key)) for key in params} == {id(param) for param in model.parameters()}
    seed_like_layers(model, spec)
    expected = model(input_ids=batch.inputs, labels=batch.labels).loss
    expected.backward()
    loss, grads = layered_step(spec, layers, batch)
    assert torch.equal(loss, expected)
    assert loss.dtype == torch.float32
    for key in params:
        assert torch.equal(grads[key], model.get_parameter(key).grad), key
    shared = [bucket.uses for bucket in spec.buckets[spec.num_layers :]]
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert shared == ([(0, spec.num_layers - 1)] if is_tied else [])


@pytest.mark.thin(8)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoupled_backward_gives_the_same_bits(family: str, precision: str) -> None:
    """With bf16, both of them, the bits of autocast, which rounds weights whenever they are used. So do
    blocks whose products are kept and all else computed again, of one backward or the other.
    """
    config = three_blocks(family, tied=family in TIED, dropout=0.2)
    spec = load_spec(small_job(family, config, train={"precision": precision}))
    layers, batch = all_layers(spec, all_params(spec)), some_batch(spec)
    found = [layered_step(spec, layers, batch)]
    if precision == "fp32":
        found.append(layered_step(spec, layers, batch, "selective"))
    for backward in ("fused", "decoupled") if precision == "bf16" else ("decoupled",):
        tables = {"train": {"precision": precision}, "schedule": {"backward": backward}}
        spec = load_spec(small_job(family, config, **tables))
        found.append(layered_step(spec, held_layers(spec, Range(0, 5)), batch))
    if precision == "bf16":
        found.append(layered_step(spec, held_layers(spec, Range(0, 5)), batch, "selective"))
    (loss, grads), *rest = found
    for other, others in rest:
        assert torch.equal(loss, other)
        assert grads.keys() == others.keys()
        assert [key for key in grads if not torch.equal(grads[key], others[key].float())] == []


def test_dropout_shows() -> None:
    """The test above would be empty where dropout did nothing."""
    batch, losses = None, set()
    for dropout in (0.0, 0.2):
        spec = load_spec(small_job("bert", three_blocks("bert", tied=True, dropout=dropout)))
        batch = batch or some_batch(spec)
        losses.add(float(layered_step(spec, held_layers(spec, Range(0, 5)), batch)[0].detach()))
    assert len(losses) == 2


@pytest.mark.parametrize("family", ["bloom", "gptj", "bert"])
def test_a_deep_model_is_cut_like_a_shallow_one(family: str) -> None:
    assert load_spec(small_job(family, small_config(family, num_hidden_layers=7))).num_layers == 9
