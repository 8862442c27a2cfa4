"""Profiles: one cost per layer, from real runs, with memory that can be counted by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from oobleckd.protocol.jobdata import Data
from oobleckd.worker import sums
from oobleckd.worker.device.measure import measure, profile_key, state_bytes
from oobleckd.worker.device.sample import sample_batch
from oobleckd.worker.models import ModelSpec, load_config, load_spec
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.models import CPU, GPT2, NO_DROPOUT, small_config, small_job
from tests.helpers.optimizers import shape_of
from tests.helpers.separate import SEQUENCE, separate_spec


def test_a_profile_has_every_layer() -> None:
    job = small_job("gpt2", {**GPT2, **NO_DROPOUT, "n_layer": 3})
    spec = load_spec(job)
    profile = measure(spec, job, CPU)
    assert [layer.name for layer in profile.layers] == ["embedding", "block 0", "block 1", "block 2", "head"]
    assert all(min(layer.forward_s, layer.backward_s, layer.update_s) > 0 for layer in profile.layers)
    assert profile.buckets == tuple(bucket.uses for bucket in spec.buckets)
    assert profile.key == profile_key(job, CPU)
    embedding, block, _, last, head = profile.layers
    assert embedding.param_bytes == 4 * 16 * (64 + 16)
    assert head.param_bytes == 4 * 16 * (64 + 2)
    assert embedding.output_bytes == block.output_bytes == 4 * 2 * 8 * 16
    assert head.output_bytes == 4
    assert (block.forward_s, block.activation_bytes) == (last.forward_s, last.activation_bytes)
    assert block.activation_bytes > 4 * block.output_bytes


def test_empty_buckets_cost_nothing_but_the_shared_weight() -> None:
    job = small_job("llama", small_config("llama", tie_word_embeddings=True))
    profile = measure(load_spec(job), job, CPU)
    assert profile.layers[0].param_bytes == 4 * 64 * 32
    assert profile.buckets[-1] == (0, 3)


def test_state_bytes() -> None:
    assert state_bytes(shape_of([(2, 3), (4,)]), True) == 10 * 24
    assert state_bytes(shape_of([(2, 3), (4,)]), False) == 10 * 20


def test_the_key_is_of_what_costs_depend_on() -> None:
    keys = {
        profile_key(job, CPU)
        for job in (
            small_job("gpt2"),
            small_job("llama"),
            small_job("gpt2", train={"sequence": 16}),
            small_job("gpt2", train={"precision": "bf16"}),
            small_job("gpt2", fault_tolerance={"check_every": 0}),
        )
    }
    assert len(keys) == 5
    assert profile_key(small_job("gpt2", train={"steps": 9}), CPU) in keys


def test_bf16_hands_over_what_blocks_produce() -> None:
    job = small_job("gpt2", train={"precision": "bf16"})
    profile = measure(load_spec(job), job, CPU)
    assert profile.layers[1].output_bytes == 4 * 2 * 8 * 32


@pytest.mark.parametrize(("every", "digests"), [(0, 0), (1, 1), (2, 0)])
def test_what_checks_cost_is_part_of_it(every: int, digests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are guarded wherever anything is compared; digests are part of a step where every step
    has them.
    """
    taken: list[int] = []
    guarded_ones: list[bool] = []
    plain = sums.empty

    def empty(*args: Any, guarded: bool) -> sums.Sum:
        guarded_ones.append(guarded)
        return plain(*args, guarded=guarded)

    monkeypatch.setattr(sums, "empty", empty)
    monkeypatch.setattr(
        "oobleckd.worker.device.measure.digest", lambda tensors, *_: taken.append(len(tensors)) or 0
    )
    job = small_job("gpt2", fault_tolerance={"check_every": every})
    measure(load_spec(job), job, CPU)
    assert bool(taken) == bool(digests)
    assert set(guarded_ones) == {every > 0}


def test_measuring_leaves_no_gradients_behind() -> None:
    before = torch.is_grad_enabled()
    job = small_job("gpt2")
    measure(load_spec(job), job, torch.device("cpu"))
    assert torch.is_grad_enabled() == before


@pytest.mark.parametrize("exact", [True, False])
def test_exact_sums_cost_memory(exact: bool) -> None:
    job = small_job("gpt2", train={"exact": exact})
    layer = measure(load_spec(job), job, CPU).layers[1]
    assert layer.state_bytes == (6 if exact else 5) * layer.param_bytes


def test_a_block_that_cannot_compute_is_a_users_error() -> None:
    job = small_job("olmo2", small_config("olmo2"))
    config = load_config(job)
    config.num_attention_heads = 3  # which the checks of a file would find
    with pytest.raises(UserError, match="cannot compute a micro-batch: The size of tensor a") as raised:
        measure(ModelSpec(job, config), job, CPU)
    assert "mend the sizes" in raised.value.hint


@pytest.mark.parametrize(("precision", "number_bytes"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize(("family", "masks"), [("gpt2", 1), ("gemma3_text", 2)])
def test_masks_of_separate_documents_count_once_and_for_no_block(
    family: str, masks: int, precision: str, number_bytes: int
) -> None:
    spec = separate_spec(family, precision)
    profile = measure(spec, spec.job, CPU)
    mask_bytes = 2 * SEQUENCE * SEQUENCE * number_bytes
    angles_bytes = 2 * 2 * 2 * SEQUENCE * 8 * 4 + 2 * SEQUENCE * 8  # cos and sin of two kinds; positions
    assert 0 <= profile.shared_bytes - masks * mask_bytes <= angles_bytes
    joined = load_spec(msgspec.structs.replace(spec.job, data=Data()))
    plain = measure(joined, joined.job, CPU)
    assert plain.shared_bytes == 0
    assert profile.key != plain.key
    # The mask that attention keeps is not among them; the angles, which a joined job's blocks share, neither.
    assert profile.layers[1].activation_bytes <= plain.layers[1].activation_bytes


def test_layers_are_measured_on_tokens_of_the_whole_vocabulary() -> None:
    """The same each time, and whatever the job's seed is, which is no part of a profile's key."""
    train = {"micro_batch": 16, "sequence": 8, "global_batch": 16}
    spec, other = (load_spec(small_job("gpt2", train={**train, "seed": seed})) for seed in (0, 5))
    tokens = sample_batch(spec).inputs
    assert torch.equal(tokens, sample_batch(other).inputs)
    assert tokens.shape == (16, 8)
    assert 40 < len(tokens.unique()) <= spec.config.vocab_size == 64
    assert int(tokens.max()) < 64
