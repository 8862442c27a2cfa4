"""The head in chunks of tokens, beside the whole one: loss, gradients, what is kept, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oobleckd.protocol.canonical import canonical
from oobleckd.protocol.job import Job
from oobleckd.worker.models import FAMILIES, MASKED, Batch, Layer, gradients, load_spec
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.documents import job_on_documents
from tests.helpers.engine import World
from tests.helpers.engine_jobs import SCHEDULES, STAGES, Reference, any_deaths, job, told_by
from tests.helpers.models import CPU, all_params, small_config, small_job

WEIGHT = 3.0


def with_chunks(size: int, family: str = "llama", **train: Any) -> Job:
    return small_job(family, train={"loss_chunk_size": size, **train})


def head_of(job: Job) -> Layer:
    """With the weights of ``job``, which are the same with any chunks."""
    spec = load_spec(job)
    last, params = spec.num_layers - 1, all_params(spec)
    keys = [key for bucket in spec.buckets_of(last) for key in spec.buckets[bucket].keys]
    return spec.layer(last, {key: params[key] for key in keys}, CPU)


def labels(tokens: Tensor) -> Tensor:
    """A chat's: most of them are not asked for, of a row none but the last."""
    asked = tokens.clone()
    asked[0, :5] = -100
    asked[1, :-1] = -100
    return asked


def computed(job: Job, *, masked: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Loss, and gradients of weights and input, for one micro-batch of 2 rows of 8."""
    head, drawn = head_of(job), torch.Generator().manual_seed(5)
    tokens = torch.randint(1, 64, (2, 8), generator=drawn)
    x = torch.randn((2, 8, 32), generator=drawn).requires_grad_()
    loss = head(x, Batch(tokens, labels(tokens) if masked else tokens))
    return loss.detach(), gradients(loss, [*head.leaves, x], torch.full_like(loss, WEIGHT))


def apart(found: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference, as a share of the largest number of its tensor."""
    pairs = zip(found, other, strict=True)
    return max(float((one - two).abs().max() / two.abs().max()) for one, two in pairs)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(MASKED)))
def test_every_causal_family_comes_to_the_whole_loss(family: str) -> None:
    """Of a chat, where most tokens are not asked for."""
    loss, grads = computed(with_chunks(5, family), masked=True)
    whole, of_whole = computed(with_chunks(0, family), masked=True)
    assert loss.item() == pytest.approx(whole.item(), abs=1e-6)
    assert apart(grads, of_whole) < 1e-5


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "llama"])
def test_bf16_is_off_by_a_rounding_of_it(family: str) -> None:
    loss, grads = computed(with_chunks(5, family, precision="bf16"))
    whole, of_whole = computed(with_chunks(0, family, precision="bf16"))
    assert loss.item() == pytest.approx(whole.item(), abs=1e-6)
    assert apart(grads, of_whole) < 2**-7
    assert all(grad.dtype == torch.float32 for grad in grads)


@pytest.mark.parametrize("size", [1, 5, 8, 16, 100])
def test_any_size_does_and_repeats(size: int) -> None:
    loss, grads = computed(with_chunks(size))
    again, same = computed(with_chunks(size))
    assert torch.equal(loss, again)
    assert all(map(torch.equal, grads, same))
    assert apart(grads, computed(with_chunks(0))[1]) < 1e-5


def test_the_loss_alone_has_the_same_bits() -> None:
    head, tokens = head_of(with_chunks(5)), torch.arange(1, 17).view(2, 8)
    x, batch = torch.ones((2, 8, 32)), Batch(tokens, tokens)
    assert torch.equal(head.evaluate(x, batch), head(x.requires_grad_(), batch).detach())


def test_a_tied_embedding_has_its_gradient() -> None:
    tied = small_config("llama", tie_word_embeddings=True)
    found = [computed(small_job("llama", tied, train={"loss_chunk_size": size}))[1] for size in (5, 0)]
    assert apart(*found) < 1e-5


def test_logits_are_never_there_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    entropy = torch.nn.functional.cross_entropy

    def note(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(len(logits))
        return entropy(logits, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", note)
    kept: list[tuple[int, ...]] = []
    head, tokens = head_of(with_chunks(5)), torch.arange(1, 17).view(2, 8)
    pack = lambda tensor: kept.append(tuple(tensor.shape)) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        head(torch.ones((2, 8, 32), requires_grad=True), Batch(tokens, tokens))
    assert seen == [5, 5, 5, 1]
    assert (64, 32) in kept  # the projection's gradient
    assert not any(shape[-1] == 64 for shape in kept)


@pytest.mark.parametrize("family", sorted(MASKED))
def test_another_loss_is_refused_by_name(family: str) -> None:
    with pytest.raises(UserError, match=rf"^train\.loss_chunk_size: the loss of {family} is transformers' "):
        load_spec(with_chunks(5, family))


def test_a_job_that_does_not_say_it_is_the_job_that_it_was() -> None:
    assert b"loss_chunk_size" not in canonical(small_job())
    assert small_job().costs_depend_on == with_chunks(0, "gpt2").costs_depend_on
    assert canonical(with_chunks(4, "gpt2")) != canonical(small_job())


# ---------------------------------------------------------------------- in the engine


@pytest.fixture(scope="module", params=["windows", "chats"])
def chunked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A job with chunks of 7 tokens, and what it comes to without failures."""
    tmp_path = tmp_path_factory.mktemp("chunked")
    if request.param == "chats":
        spec = job_on_documents("llama", tmp_path, "chats", steps=5, global_batch=8, loss_chunk_size=7)
    else:
        spec = job(tmp_path, loss_chunk_size=7)
    world = World(spec, STAGES, 0, tmp_path)
    world.run()
    return spec, world.losses, world.weights()


def test_a_process_alone_has_the_same_losses(chunked: Reference, tmp_path: Path) -> None:
    assert told_by(chunked[0], tmp_path) == chunked[1]


@pytest.mark.thin(6)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(4))
def test_deaths_do_not_show(chunked: Reference, tmp_path: Path, seed: int, schedule: str) -> None:
    any_deaths(chunked, tmp_path, seed, schedule, redundant=seed % 2 == 0)
