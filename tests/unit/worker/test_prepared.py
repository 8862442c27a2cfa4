"""A folder that was prepared is trained on by its manifest: nobody reads all of it, and what is torn, or was
changed, is refused before it is trained on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from oobleckd.protocol.inputs import same
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import FromWorker, StepDone
from oobleckd.tokens import pieces as pieces_module
from oobleckd.tokens.manifest import MANIFEST, PIECE, TOKENS
from oobleckd.worker.data import inputs as inputs_module
from oobleckd.worker.data import sources as sources_module
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.data.input_watch import Eyes
from oobleckd.worker.data.rows import Misread
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.tools.reference import run
from tests.helpers.models import GPT2, small_config, small_job
from tests.helpers.prepared import prepared

NUMBERS = np.random.default_rng(0).integers(0, 60_000, 1280)
LONG = np.random.default_rng(1).integers(0, 60_000, PIECE + 1000)
WIDE = np.random.default_rng(2).integers(0, 128_256, 1280)
WIDE[:2] = 0, 128_255


def job_of(folder: Path, vocab_size: int = 60_000, **data: Any) -> Job:
    table = {"source": "jsonl", "path": "/nowhere.jsonl", "prepared": str(folder), **data}
    return small_job("gpt2", {**GPT2, "vocab_size": vocab_size}, data=table)


def refused(folder: Path, vocab_size: int = 60_000) -> UserError:
    with pytest.raises(UserError) as raised:
        open_corpus(job_of(folder, vocab_size))
    return raised.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepared(tmp_path / "x", [NUMBERS[:100], NUMBERS[100:]], "uint16")


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of three pieces that is too large to be read when it is opened."""
    monkeypatch.setattr(inputs_module, "SMALL_BYTES", 1000)
    return prepared(tmp_path / "x", [LONG], "uint16")


def damage(folder: Path, at: int) -> None:
    """Another byte, with the time put back: nothing but the bytes says so."""
    with (folder / TOKENS).open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))


def test_its_samples_are_those_of_the_same_numbers_in_a_plain_file(folder: Path, tmp_path: Path) -> None:
    NUMBERS.astype("<u2").tofile(tmp_path / "plain.bin")
    model = {**GPT2, "vocab_size": 60_000}
    plain = open_corpus(
        small_job("gpt2", model, data={"source": "tokens", "path": str(tmp_path / "plain.bin")})
    )
    found = open_corpus(job_of(folder))
    assert found.digest == plain.digest
    assert same(found.inputs.part, plain.inputs.part)
    for step in range(4):
        assert found.of_step(step) == plain.of_step(step)
        assert found.tokens(step, 1).tolist() == plain.tokens(step, 1).tolist()


def test_of_a_large_one_nobody_reads_all(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest, no largest token; of each piece the checksum when it is first read, and never again."""
    read: list[int] = []
    crc32 = pieces_module.zlib.crc32
    monkeypatch.setattr(pieces_module.zlib, "crc32", lambda data: read.append(len(data)) or crc32(data))
    monkeypatch.setattr(sources_module, "check_vocabulary", None)
    corpus = open_corpus(job_of(large))
    assert read == []
    assert corpus.inputs.part.whole
    for step in range(30):
        corpus.batch(step, 0)
    assert 0 < len(read) <= 3
    assert Eyes(corpus.inputs).verify() is None


def test_a_small_one_that_was_changed_is_refused_at_once(folder: Path) -> None:
    damage(folder, 2000)
    error = refused(folder)
    assert "tokens.bin is not what its manifest says: from byte 0 on" in str(error)
    assert f"delete {folder}, and run `oobleckctl data prepare` again" in error.hint


def test_a_large_one_is_refused_before_what_was_changed_is_trained_on(large: Path) -> None:
    damage(large, PIECE + 7)
    corpus = open_corpus(job_of(large))
    wrong = range(PIECE // 16, 2 * PIECE // 16)  # windows of eight tokens
    right = 0
    for step in range(100):
        if any(corpus.place(sample).row in wrong for sample in corpus.sample_ids(step, 0)):
            with pytest.raises(Misread, match=r"from byte 1,048,576 on") as raised:
                corpus.batch(step, 0)
            assert "data prepare" in raised.value.hint
            break
        right += 1
        corpus.batch(step, 0)
    else:
        raise AssertionError("none of them was drawn")
    with pytest.raises(UserError, match="from byte 1,048,576 on"):  # who knows looks there first
        open_corpus(job_of(large))
    damage(large, PIECE + 7)
    open_corpus(job_of(large)).batch(right, 0)


def _cut(folder: Path) -> None:
    with (folder / TOKENS).open("r+b") as file:
        file.truncate(2000)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_cut, "tokens.bin has 560 bytes less than its manifest says"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json: No such file or directory"),
        (lambda folder: folder.rename(folder.with_name("y")), "/x is not seen on this machine"),
    ],
)
def test_what_is_torn_is_refused(folder: Path, change: Callable[[Path], None], says: str) -> None:
    change(folder)
    error = refused(folder)
    assert says in str(error)
    assert str(error).startswith("data.prepared: ")
    assert error.hint


def test_a_vocabulary_is_looked_at_by_the_manifest(large: Path) -> None:
    largest = int(LONG.max())
    open_corpus(job_of(large, largest + 1))
    error = refused(large, largest)
    assert f"has token {largest}, but the model's vocabulary ends at {largest - 1}" in str(error)
    assert f"{largest + 1} or more" in error.hint


def test_one_that_is_not_prepared_says_what_to_run() -> None:
    job = small_job(data={"source": "parquet", "path": "/p", "tokenizer": "/t"})
    with pytest.raises(UserError, match="/p is not prepared") as raised:
        open_corpus(job)
    assert "oobleckctl data prepare" in raised.value.hint


# --------------------------------------------------------------------------- the same numbers, however stored


def _npy(path: Path, numbers: npt.NDArray[np.int64]) -> dict[str, str]:
    np.save(path / "t.npy", numbers.astype("<u4"))
    return {"source": "npy", "path": f"{path}/t.npy"}


def _llmc(path: Path, numbers: npt.NDArray[np.int64]) -> dict[str, str]:
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, len(numbers)
    (path / "t.bin").write_bytes(header.tobytes() + numbers.astype("<u4").tobytes())
    return {"source": "llmc", "path": f"{path}/t.bin"}


def _megatron(path: Path, numbers: npt.NDArray[np.int64]) -> dict[str, str]:
    numbers.astype("<i4").tofile(path / "t.bin")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 1, 2) + struct.pack("<i", len(numbers))
    (path / "t.idx").write_bytes(index + struct.pack("<qqq", 0, 0, 1))
    return {"source": "megatron", "path": f"{path}/t"}


def _plain(kind: str, dtype: str) -> Callable[[Path, npt.NDArray[np.int64]], dict[str, str]]:
    def write(path: Path, numbers: npt.NDArray[np.int64]) -> dict[str, str]:
        numbers.astype(kind).tofile(path / "t.bin")
        return {"source": "bin", "path": f"{path}/t.bin", "dtype": dtype}

    return write


def _prepared(path: Path, numbers: npt.NDArray[np.int64]) -> dict[str, str]:
    folder = prepared(path / "x", [numbers[:500], numbers[500:]], "int32")
    return {"source": "text", "path": f"{path}/*.txt", "tokenizer": "/t", "prepared": str(folder)}


WAYS = {
    "npy": _npy,
    "llmc": _llmc,
    "megatron": _megatron,
    "uint32": _plain("<u4", "uint32"),
    "int32": _plain("<i4", "int32"),
    "int64": _plain("<i8", "int64"),
    "prepared": _prepared,
}


def losses_of(job: Job, out: Path) -> list[float]:
    told: list[FromWorker] = []
    place = msgspec.structs.replace(job.checkpoint, dir=str(out))
    run(msgspec.structs.replace(job, checkpoint=place), out, told.append)
    return [message.loss for message in told if isinstance(message, StepDone)]


def test_a_vocabulary_of_128_256_trains_whatever_the_file(tmp_path: Path) -> None:
    model = small_config("llama", hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        intermediate_size=16, num_hidden_layers=1, vocab_size=128_256)  # fmt: skip
    seen: dict[str, list[int]] = {}
    losses: dict[str, list[float]] = {}
    for name, write in WAYS.items():
        (tmp_path / name).mkdir()
        job = small_job("llama", model, data=write(tmp_path / name, WIDE))
        corpus = open_corpus(job)
        seen[name] = corpus.tokens(0, 0).flatten().tolist() + corpus.tokens(39, 1).flatten().tolist()
        if name in {"int64", "prepared"}:
            losses[name] = losses_of(job, tmp_path / name)
    assert losses["int64"] == losses["prepared"]
    assert len(losses["int64"]) == 3
    assert losses["int64"][0] == pytest.approx(np.log(128_256), abs=0.2)
    assert all(each == seen["prepared"] for each in seen.values())
    assert max(seen["prepared"]) > 65_535
