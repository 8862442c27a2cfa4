"""The same 2,000 documents, in every format that a job reads and from a store, are the same tokens and the
same first 20 losses; of a tokenizer and a model of 128,256 tokens.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from oobleckd.prepare import build, objects, sources
from oobleckd.prepare import tokenizer as tokenizers
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import FromWorker, StepDone
from oobleckd.tokens.index import read_index
from oobleckd.tokens.manifest import INDEX, TOKENS
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.tools.reference import run
from tests.helpers import one_process
from tests.helpers.corpora import write_corpora
from tests.helpers.models import small_config, small_job
from tests.helpers.one_process import OneProcess
from tests.helpers.s3_server import s3_server

VOCABULARY, EOS = 128_256, 128_001
NUM_DOCUMENTS, NUM_STEPS = 2000, 20
Numbers = npt.NDArray[np.int64]


# --------------------------------------------------------------------------- numbers that others wrote


def _npy(folder: Path, tokens: Numbers, _lengths: Numbers) -> dict[str, str]:
    np.save(folder / "t.npy", tokens.astype("<u4"))
    return {"source": "npy", "path": f"{folder}/t.npy"}


def _llmc(folder: Path, tokens: Numbers, _lengths: Numbers) -> dict[str, str]:
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, len(tokens)
    (folder / "t.bin").write_bytes(header.tobytes() + tokens.astype("<u4").tobytes())
    return {"source": "llmc", "path": f"{folder}/t.bin"}


def _megatron(folder: Path, tokens: Numbers, lengths: Numbers) -> dict[str, str]:
    """Byte for byte as its documentation says."""
    tokens.astype("<i4").tofile(folder / "t.bin")
    starts = np.cumsum(lengths) - lengths
    (folder / "t.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1)
        + lengths.astype("<i4").tobytes()
        + (4 * starts).astype("<i8").tobytes()
        + np.arange(len(lengths) + 1).astype("<i8").tobytes()
    )
    return {"source": "megatron", "path": f"{folder}/t"}


def _plain(kind: str, dtype: str) -> Callable[[Path, Numbers, Numbers], dict[str, str]]:
    def write(folder: Path, tokens: Numbers, _lengths: Numbers) -> dict[str, str]:
        tokens.astype(kind).tofile(folder / "t.bin")
        return {"source": "bin", "path": f"{folder}/t.bin", "dtype": dtype}

    return write


READY_MADE = {
    "npy": _npy,
    "llm.c": _llmc,
    "Megatron": _megatron,
    "int32": _plain("<i4", "int32"),
    "uint32": _plain("<u4", "uint32"),
    "int64": _plain("<i8", "int64"),
}
FILES = ("jsonl", "gz", "zst", "parquet", "saved", "text")
STORED = {
    "s3 jsonl": ("jsonl", "s3://corpus/a.jsonl"),
    "s3 zst": ("jsonl", "s3://corpus/c.jsonl.zst"),
    "s3 parquet": ("parquet", "s3://corpus/d.parquet"),
    "s3 saved": ("arrow", "s3://corpus/saved"),
}


# --------------------------------------------------------------------------- what they are compared by


@dataclass
class Documents:
    """``files``: by format; ``numbers`` and ``lengths``: their tokens, as ``tokenizers`` has them."""

    root: Path
    tokenizer: Path
    files: dict[str, tuple[str, str]]
    numbers: Numbers
    lengths: Numbers
    losses: dict[str, list[float]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Documents]:
    root = tmp_path_factory.mktemp("formats")
    chance = random.Random(3)
    words = [
        [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 40))] for _ in range(NUM_DOCUMENTS)
    ]
    words[7] = [0, VOCABULARY - 1]
    texts = [" ".join(f"w{number}" for number in document) for document in words]
    tokenizer = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(root / "tokenizer.json"), pretty=False)
    (root / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    files = {name: (kind, str(path)) for name, (kind, path) in write_corpora(root / "corpus", texts).items()}
    numbers = np.array([token for document in words for token in (*document, EOS)], np.int64)
    lengths = np.array([len(document) + 1 for document in words], np.int64)
    with s3_server(root) as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        patch.setattr(build, "Pool", OneProcess)
        opened = cache(tokenizers.opened)  # a tenth of a second each
        patch.setattr(tokenizers, "opened", opened)
        patch.setattr(one_process, "opened", opened)
        patch.setattr(sources, "PIECE_BYTES", 100_000)
        objects._store.cache_clear()
        yield Documents(root, root, {**files, **STORED}, numbers, lengths)
        objects._store.cache_clear()


def job_of(data: dict[str, Any]) -> Job:
    model = small_config("llama", hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        intermediate_size=16, num_hidden_layers=1, vocab_size=VOCABULARY)  # fmt: skip
    return small_job("llama", model, data=data, train={"steps": NUM_STEPS})


def batches_of(job: Job) -> str:
    """A digest of all that the steps train on."""
    corpus, seen = open_corpus(job), hashlib.sha256()
    for step in range(NUM_STEPS):
        for micro_batch in range(job.num_micro_batches):
            seen.update(repr(corpus.sample_ids(step, micro_batch)).encode())
            seen.update(corpus.tokens(step, micro_batch).numpy().tobytes())
    return seen.hexdigest()


def losses_of(job: Job, out: Path) -> list[float]:
    told: list[FromWorker] = []
    place = msgspec.structs.replace(job.checkpoint, dir=str(out))
    run(msgspec.structs.replace(job, checkpoint=place), out, told.append)
    return [message.loss for message in told if isinstance(message, StepDone)]


def prepared(documents: Documents, name: str, folder: Path) -> Job:
    source, path = documents.files[name]
    data = {"source": source, "path": path, "tokenizer": str(documents.tokenizer), "cache": str(folder)}
    done = build.prepare(job_of(data), 1, lambda _progress: None)
    assert np.array_equal(np.fromfile(done.folder / TOKENS, "<i4"), documents.numbers)
    assert np.array_equal(np.diff(read_index(done.folder / INDEX).document_starts()), documents.lengths)
    return job_of({**data, "prepared": str(done.folder)})


@pytest.mark.parametrize("name", [*FILES, *STORED, *READY_MADE, "prepared elsewhere"])
def test_every_format_is_the_same_tokens_and_losses(documents: Documents, tmp_path: Path, name: str) -> None:
    """Losses follow from the model and the micro-batches: where these are equal byte for byte, they are
    trained once.
    """
    if name in READY_MADE:
        job = job_of(READY_MADE[name](tmp_path, documents.numbers, documents.lengths))
    elif name == "prepared elsewhere":  # what `prepare` wrote, as Megatron's
        folder = prepared(documents, "jsonl", tmp_path / "cache").data.prepared
        shutil.copy(f"{folder}/{TOKENS}", tmp_path / "t.bin")
        shutil.copy(f"{folder}/{INDEX}", tmp_path / "t.idx")
        job = job_of({"source": "megatron", "path": f"{tmp_path}/t"})
    else:
        job = prepared(documents, name, tmp_path / "cache")
    assert np.array_equal(open_corpus(job).sources[0]._tokens, documents.numbers)
    batches = batches_of(job)
    if batches not in documents.losses:
        documents.losses[batches] = losses_of(job, tmp_path)
    (losses,) = documents.losses.values()
    assert len(losses) == NUM_STEPS
    assert losses[0] == pytest.approx(np.log(VOCABULARY), abs=0.2)
