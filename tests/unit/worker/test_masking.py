"""What a masked language model is asked: a share of every sequence, by a function of (seed, step,
micro-batch).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oobleckd.worker.data.corpus import Corpus, open_corpus
from oobleckd.worker.data.masking import NOT_ASKED, Masking
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.models import small_config, small_job

MASK, VOCAB = 999, 1000
TOKENS = torch.arange(64 * 100).reshape(64, 100) % 500
FULL = [100] * 64


def test_fifteen_percent_of_every_sequence_are_asked() -> None:
    batch = Masking(0, MASK, VOCAB)(TOKENS, FULL, 3, 1)
    asked = batch.labels != NOT_ASKED
    assert asked.sum(dim=1).tolist() == [15] * 64
    assert torch.equal(batch.labels[asked], TOKENS[asked])
    assert torch.equal(batch.inputs[~asked], TOKENS[~asked])
    shown = batch.inputs[asked]
    hidden, kept = (shown == MASK).float().mean(), (shown == TOKENS[asked]).float().mean()
    assert float(hidden) == pytest.approx(0.8, abs=0.04)
    assert float(kept) == pytest.approx(0.1, abs=0.04)
    assert int(shown.max()) < VOCAB


def test_a_short_sequence_is_asked_once() -> None:
    labels = Masking(0, MASK, VOCAB)(TOKENS[:, :2], [2] * 64, 0, 0).labels
    assert (labels != NOT_ASKED).sum(dim=1).tolist() == [1] * 64


def test_every_step_and_micro_batch_hides_anew() -> None:
    torch.default_generator.manual_seed(1)
    state = torch.get_rng_state()
    first = Masking(7, MASK, VOCAB)(TOKENS, FULL, 1, 2)
    assert torch.equal(torch.get_rng_state(), state)
    again = Masking(7, MASK, VOCAB)(TOKENS, FULL, 1, 2)
    assert torch.equal(again.inputs, first.inputs)
    assert torch.equal(again.labels, first.labels)
    for seed, step, micro_batch in [(8, 1, 2), (7, 2, 2), (7, 1, 3), (7, 2, 1)]:
        assert not torch.equal(
            Masking(seed, MASK, VOCAB)(TOKENS, FULL, step, micro_batch).labels, first.labels
        )


def corpus_of(family: str, folder: Path, vocab_size: int, mask_token: int = -1) -> Corpus:
    path = folder / "text"
    path.write_bytes(bytes(range(60)) * 10)
    data = {"source": "text", "path": str(path), "mask_token": mask_token}
    return open_corpus(small_job(family, small_config(family, vocab_size=vocab_size), data=data))


def test_the_family_decides_what_is_asked(tmp_path: Path) -> None:
    causal = corpus_of("gpt2", tmp_path, 60).batch(0, 0)
    assert causal.inputs is causal.labels
    corpus = corpus_of("bert", tmp_path, 61)
    masked = corpus.batch(0, 0)
    asked = masked.labels != NOT_ASKED
    assert torch.equal(masked.labels[asked], corpus.tokens(0, 0)[asked])


def test_the_mask_token_must_be_in_the_vocabulary(tmp_path: Path) -> None:
    assert corpus_of("bert", tmp_path, 60, mask_token=0)
    with pytest.raises(UserError, match=r"data\.mask_token: 60"):
        corpus_of("bert", tmp_path, 60, mask_token=60)


def test_the_last_number_is_the_mask_token_and_no_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ends at 59, the mask token") as raised:
        corpus_of("bert", tmp_path, 60)
    assert raised.value.hint == "set model.config.vocab_size to 61 or more"
