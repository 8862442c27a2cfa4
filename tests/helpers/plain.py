"""A step as anybody would write it: transformers' whole model, torch's cross-entropy, every document in a row
of its own; and the same step as the engine makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import StepDone
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.data.masking import NOT_ASKED
from oobleckd.worker.models import MASKED, Batch, load_spec
from oobleckd.worker.state.store import Store
from oobleckd.worker.tools import reference
from oobleckd.worker.training import executor
from tests.helpers.models import all_params, undivided


@dataclass(frozen=True)
class Step:
    """The loss of a job's first step, and its gradients by key."""

    loss: float
    grads: dict[str, Tensor]


def plain_step(job: Job) -> Step:
    """In a plain loop: the loss is the mean over all that is asked in the step."""
    spec = load_spec(job)
    params = all_params(spec)
    model = undivided(spec, params)
    corpus = open_corpus(job)
    batches = [corpus.batch(0, micro_batch) for micro_batch in range(job.batch_sizes.micro_batches(0))]
    loss = _backward(model, batches, is_causal=job.model.family not in MASKED)
    grads = {key: model.get_parameter(key).grad for key in params}
    return Step(loss, {key: grad for key, grad in grads.items() if grad is not None})


def _backward(model: PreTrainedModel, batches: Iterable[Batch], *, is_causal: bool) -> float:
    documents = [each for batch in batches for each in _documents(batch)]
    num_targets = sum(int((labels != NOT_ASKED).sum()) for _, labels in documents)
    total = 0.0
    for tokens, labels in documents:
        if (labels == NOT_ASKED).all():
            continue
        logits = model(input_ids=tokens[None]).logits[0].double()
        named = (logits[:-1], labels[1:]) if is_causal else (logits, labels)
        loss = cross_entropy(*named, reduction="sum", ignore_index=NOT_ASKED) / num_targets
        loss.backward()
        total += loss.item()
    return total


def plain_evaluation(job: Job) -> dict[str, float]:
    """The loss of a job's first weights on each source that it is evaluated on, in a plain loop."""
    spec = load_spec(job)
    model = undivided(spec, all_params(spec)).eval()
    evaluation = open_corpus(job).evaluation
    assert evaluation is not None
    asked: dict[str, list[Tensor]] = {}
    for number in range(len(evaluation.targets)):
        for tokens, labels in _documents(evaluation.batch(number)):
            with torch.no_grad():
                logits = model(input_ids=tokens[None]).logits[0].double()
            named = (logits, labels) if job.model.family in MASKED else (logits[:-1], labels[1:])
            each = cross_entropy(*named, reduction="none", ignore_index=NOT_ASKED)
            asked.setdefault(evaluation.source_of(number), []).append(each[named[1] != NOT_ASKED])
    return {source: float(torch.cat(losses).mean()) for source, losses in asked.items()}


def _documents(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels of each; of a row that is not kept apart, all of it."""
    for row, (tokens, labels) in enumerate(zip(batch.inputs, batch.labels, strict=True)):
        numbers = torch.zeros_like(tokens) if batch.documents is None else batch.documents[row]
        for number in numbers.unique():
            yield tokens[numbers == number], labels[numbers == number]


def engine_step(job: Job, out: Path) -> Step:
    """By the engine, on one device."""
    apply, told = executor.apply_update, list[Any]()
    grads: dict[str, Tensor] = {}

    def seen(job_: Job, store: Store, reduced: Any, *rest: Any) -> None:
        if not grads:
            for bucket, part in reduced.items():
                named = zip(store.spec.buckets[bucket].keys, part.grads, strict=True)
                grads.update({key: grad.clone() for key, grad in named})
        apply(job_, store, reduced, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "apply_update", seen)
        reference.run(job, out, told.append)
    return Step(next(message.loss for message in told if isinstance(message, StepDone)), grads)


def assert_same(found: Step, wanted: Step) -> None:
    """Losses within 1e-6, and each gradient within 1e-5 of its largest. What is 0 but for rounding (as of an
    attention's key biases) within 1e-6 of the largest of all.
    """
    assert found.loss == pytest.approx(wanted.loss, abs=1e-6)
    assert found.grads.keys() == wanted.grads.keys()
    largest = {key: float(grad.abs().max()) for key, grad in wanted.grads.items()}
    least = 1e-6 * max(largest.values())
    for key, grad in wanted.grads.items():
        bound = 1e-5 * largest[key] if largest[key] > least else least
        assert float((found.grads[key] - grad).abs().max()) <= bound, key
