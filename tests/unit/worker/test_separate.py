"""Documents of a row that are kept apart: in every family none sees another, nor shows in another's bits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from oobleckd.worker.models import FAMILIES, MASKED, Batch, ModelSpec, load_config, load_spec, tensors_of
from oobleckd.worker.models.config import BY_MASK, EXPERTS, JOINED_ONLY
from oobleckd.worker.models.separate import _masks, borders, first_position
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.models import all_layers, layered_step, small_config, small_job, some_batch, undivided
from tests.helpers.separate import (
    BESIDE_EACH_OTHER,
    SEQUENCE,
    loud_params,
    packed_batch,
    places_of,
    separate_spec,
    some_tokens,
)

SEPARATE = tuple(family for family in FAMILIES if family not in JOINED_ONLY)
WITH_BITS = tuple(family for family in SEPARATE if family not in EXPERTS)
"""A product of an expert is of the tokens of all documents that chose it, and rounds by how many they are."""
SOME = ("bert", "gemma3_text", "gpt2", "gpt_oss", "llama", "modernbert", "mpt", "opt")
"""At least one of every kind of positions, masks and windows."""
FEW = ("gemma3_text", "opt")
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
_NOT_ASKED = -100


def of(chosen: Sequence[str], families: Sequence[str] = SEPARATE) -> pytest.MarkDecorator:
    """Each of ``families``; all but the ``chosen`` are slow."""
    marks = {family: () if family in chosen else pytest.mark.slow for family in families}
    return pytest.mark.parametrize("family", [pytest.param(each, marks=mark) for each, mark in marks.items()])


def logits_of(spec: ModelSpec, params: dict[str, Tensor], batch: Batch) -> Tensor:
    """Of the model that is cut into layers."""
    calls = spec.calls(*places_of(batch))
    x: Tensor | None = None
    *layers, head = all_layers(spec, params)
    with torch.no_grad():
        for layer in layers:
            x = layer(x, batch, calls.get(layer.index))
        found: Tensor = head.module(inputs_embeds=x).logits
    return found


def far_from(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@torch.no_grad()
@of(SEPARATE)
def test_a_document_computes_as_if_it_were_alone(family: str) -> None:
    spec = separate_spec(family)
    params, tokens = loud_params(spec), some_tokens(spec)
    whole = undivided(spec, params)
    alone = torch.stack(
        [
            torch.cat([whole(input_ids=part[None]).logits[0] for part in row.split(lengths)])
            for row, lengths in zip(tokens, BESIDE_EACH_OTHER, strict=True)
        ]
    )
    assert far_from(logits_of(spec, params, packed_batch(tokens)), alone) < 1e-4
    joined = packed_batch(tokens, ((SEQUENCE,), (SEQUENCE,)))
    assert far_from(logits_of(spec, params, joined), alone) > 1e-2, "a leak would not show"


@torch.no_grad()
@of(SOME)
def test_the_cut_model_has_the_bits_of_the_undivided_one(family: str) -> None:
    """With the same positions, and, where the family needs one, a mask; the others conclude it from those."""
    spec = separate_spec(family)
    params, batch = loud_params(spec), packed_batch(some_tokens(spec))
    positions, documents = places_of(batch)
    whole = undivided(spec, params)
    inputs: dict[str, Any] = {"position_ids": positions + first_position(family, spec.config)}
    if family in BY_MASK:
        inputs["attention_mask"] = _masks(whole.config, documents)
    wanted = whole(input_ids=batch.inputs, **inputs).logits
    assert torch.equal(logits_of(spec, params, batch), wanted)


def test_borders_are_a_threads_own() -> None:
    """Two devices in one process, as tests have them: the one that ended last left its own for good."""
    positions, documents = torch.tensor([[0, 1, 0]]), torch.tensor([[4, 4, 4]])
    with borders(documents):
        with ThreadPoolExecutor(1) as other:
            both = Barrier(2)
            overlapping = other.submit(_within_borders, both)
            both.wait()
            assert masking_utils.find_packed_sequence_indices(positions) is documents
        assert overlapping.result() is None
    concluded = masking_utils.find_packed_sequence_indices(positions)
    assert concluded is not None
    assert concluded.tolist() == [[0, 0, 1]]


def _within_borders(both: Barrier) -> Tensor | None:
    """What transformers concludes in a thread without borders; it goes on after ``both`` have met."""
    with borders(None):
        both.wait()
        return masking_utils.find_packed_sequence_indices(torch.tensor([[0, 1, 0]]))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@of(SOME, WITH_BITS)
def test_no_bit_of_a_document_depends_on_what_stands_beside_it(family: str, precision: str) -> None:
    """Neither on the tokens of the others, nor on where they begin, nor on the other rows: whatever the loss
    of the one asks for gives the same gradients.
    """
    spec = separate_spec(family, precision)
    params = loud_params(spec)
    tokens, others = some_tokens(spec), some_tokens(spec, seed=4)
    mine = torch.zeros_like(tokens, dtype=torch.bool)
    mine[0, 5:9] = True
    labels = torch.where(mine, tokens, _NOT_ASKED)
    if family not in MASKED:
        labels[0, 5] = _NOT_ASKED  # of its first token there is nothing to be concluded from
    found = []
    for beside, rows in ((tokens, BESIDE_EACH_OTHER), (others, ((2, 3, 4, 3), (SEQUENCE,)))):
        batch = packed_batch(torch.where(mine, tokens, beside), rows, labels)
        found.append(layered_step(spec, all_layers(spec, params), batch))
    (loss, grads), (other, others_grads) = found
    assert torch.equal(loss, other)
    assert [key for key in grads if not torch.equal(grads[key], others_grads[key])] == []
    assert any(grad.any() for grad in grads.values())


@of(FEW, WITH_BITS)
def test_a_row_without_borders_has_the_bits_that_it_has_beside_one_with_some(family: str) -> None:
    """Without a mask another kernel would compute it."""
    spec = separate_spec(family)
    params, tokens = loud_params(spec), some_tokens(spec)
    row, *_ = logits_of(spec, params, packed_batch(tokens, ((SEQUENCE,), (SEQUENCE,))))
    assert torch.equal(row, logits_of(spec, params, packed_batch(tokens, ((SEQUENCE,), (5, 7))))[0])


@of(FEW)
def test_a_decoupled_backward_gives_the_same_bits(family: str) -> None:
    found = []
    for backward in ("fused", "decoupled"):
        spec = separate_spec(family, backward=backward)
        found.append(layered_step(spec, all_layers(spec, loud_params(spec)), packed_batch(some_tokens(spec))))
    (loss, grads), (other, others) = found
    assert torch.equal(loss, other)
    assert [key for key in grads if not torch.equal(grads[key], others[key])] == []


class NoHostRead(TorchDispatchMode):
    """Refuses what makes a GPU be waited for: a number of a tensor that Python looks at."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a number is read from the device"
        return func(*args, **(kwargs or {}))


@of(SOME)
def test_nothing_is_read_from_the_device(family: str) -> None:
    spec = separate_spec(family)
    batch = packed_batch(some_tokens(spec))
    embedding = all_layers(spec, loud_params(spec))[0]
    spec.calls(*places_of(batch))
    with NoHostRead():
        embedding(None, batch)
        spec.calls(*places_of(batch))


@pytest.mark.parametrize("family", ["falcon", "gemma3_text", "gpt2", "llama", "opt"])
def test_nothing_is_read_from_the_device_where_documents_are_joined(family: str) -> None:
    spec = load_spec(small_job(family))
    embedding, batch = all_layers(spec, loud_params(spec))[0], some_batch(spec)
    with NoHostRead():
        embedding(None, batch)


@pytest.mark.parametrize(
    ("family", "precision", "count"),
    [("llama", "fp32", 1), ("llama", "bf16", 1), ("gemma3_text", "bf16", 2), ("bert", "bf16", 1)],
)
def test_blocks_that_are_alike_share_a_mask_that_attention_keeps_as_it_is(
    family: str, precision: str, count: int
) -> None:
    """Of another type than the queries' it would be copied, and the copy kept, in every layer."""
    spec = separate_spec(family, precision)
    batch = packed_batch(some_tokens(spec))
    calls = spec.calls(*places_of(batch))
    masks = {id(mask): mask for call in calls.values() for mask in tensors_of(call) if mask.dim() == 4}
    assert len(masks) == count
    wanted = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {mask.dtype for mask in masks.values()} == {wanted}
    layers = all_layers(spec, loud_params(spec))
    x = layers[0](None, batch)
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape[-2:]) == (SEQUENCE, SEQUENCE) and tensor.dtype == wanted:
            kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layers[1](x, batch, calls[1])
    assert set(kept) & {mask.untyped_storage().data_ptr() for mask in masks.values()}
    assert len(set(kept)) == 1


@pytest.mark.parametrize(
    ("family", "config"),
    [
        *((family, {}) for family in JOINED_ONLY),
        ("falcon", {"alibi": True}),
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 8}),
    ],
)
def test_a_model_that_cannot_keep_them_apart_is_refused_by_name(family: str, config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f'data.documents: "separate" does not go with .*{family}'):
        separate_spec(family, **config)
    load_config(small_job(family, small_config(family, **config)))  # joined it is trained as ever


@of(SOME)
def test_a_model_that_keeps_them_apart_is_let_in(family: str) -> None:
    separate_spec(family).try_blocks()


def test_a_model_that_a_folder_says_sees_both_ways_is_refused() -> None:
    """Transformers then makes a mask for it without a look at the borders."""
    job = separate_spec("llama").job
    config = load_config(job)
    config.is_causal = False
    with pytest.raises(UserError, match="block 0 would see other documents"):
        ModelSpec(job, config).try_blocks()


def test_angles_that_no_row_changes_are_let_in() -> None:
    assert separate_spec("phi3", rope_parameters=LONG, original_max_position_embeddings=SEQUENCE)


def test_the_table_of_the_manual_is_that_of_the_code() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/models.md").read_text(encoding="utf-8")
    rows = page.partition("| Kept apart by |")[2].partition("\n\n")[0].splitlines()[2:]
    by_border, by_mask, _ = (row.split("|")[2].replace(" ", "").split(",") for row in rows)
    assert by_mask == sorted(BY_MASK)
    assert by_border == sorted(set(SEPARATE) - BY_MASK)
    assert [family for family in JOINED_ONLY if family not in rows[-1]] == []


def test_rows_begin_where_a_family_counts_from() -> None:
    of_family = {each: first_position(each, separate_spec(each).config) for each in ("gpt2", "roberta")}
    assert of_family == {"gpt2": 0, "roberta": 1}  # pad_token_id is 0


def test_every_document_counts_from_its_own_beginning() -> None:
    _, documents = places_of(packed_batch(torch.zeros((2, SEQUENCE), dtype=torch.int64)))
    mask = _masks(separate_spec("opt")._split.model.config, documents)
    assert isinstance(mask, Tensor)
    for row, lengths in enumerate(BESIDE_EACH_OTHER):
        ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        for start, stop in pairwise(ends):
            seen = mask[row, 0, start:stop]
            assert torch.equal(seen[:, start:stop], torch.ones(stop - start, stop - start).tril() > 0)
            assert seen.sum() == seen[:, start:stop].sum()
