"""Documents in every format that ``oobleckctl data prepare`` reads, and a tokenizer for them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from oobleckd.protocol.job import Job, parse_job

EOS = "<|endoftext|>"
DOCUMENTS = tuple(
    f"Document {number} of {'many ' * (number % 7)}words, with a line\nand ünïcödé {number * 37}."
    for number in range(40)
)


def make_tokenizer(folder: Path, texts: Sequence[str] = DOCUMENTS, size: int = 300, eos: str = EOS) -> Path:
    """``folder`` with a tokenizer.json: bytes, and pairs of them that ``texts`` have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[eos] if eos else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_corpora(folder: Path, documents: Sequence[str] = DOCUMENTS) -> dict[str, tuple[str, Path]]:
    """Name -> ``data.source`` and path of the same documents."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents)).encode()
    half = lines.index(b"\n", len(lines) // 2) + 1
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[:half]) + gzip.compress(lines[half:]))
    with (
        pa.OSFile(str(folder / "c.jsonl.zst"), "wb") as file,
        pa.CompressedOutputStream(file, "zstd") as packed,
    ):
        packed.write(lines)
    several = folder / "several"
    several.mkdir()
    (several / "1.jsonl").write_bytes(lines[:half])
    (several / "2.ndjson").write_bytes(lines[half:])
    table = pa.table({"id": range(len(documents)), "text": list(documents)})
    pq.write_table(table, folder / "d.parquet", row_group_size=7)
    save_to_disk(folder / "saved", table)
    with pa.OSFile(str(folder / "e.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, 6)
    texts = folder / "texts"
    (texts / "below").mkdir(parents=True)
    for number, text in enumerate(documents):
        name = f"{number:03d}.txt"
        (texts / ("below" if number % 2 else "") / name).write_text(text, encoding="utf-8")
    ordered = sorted(texts.rglob("*.txt"), key=Path.as_posix)
    for number, file_ in enumerate(ordered):  # in the order in which they are read
        file_.write_text(documents[number], encoding="utf-8")
    return {
        "jsonl": ("jsonl", folder / "a.jsonl"),
        "gz": ("jsonl", folder / "b.jsonl.gz"),
        "zst": ("jsonl", folder / "c.jsonl.zst"),
        "folder": ("jsonl", several),
        "pattern": ("jsonl", several / "*json*"),
        "parquet": ("parquet", folder / "d.parquet"),
        "saved": ("arrow", folder / "saved"),
        "arrow": ("arrow", folder / "e.arrow"),
        "text": ("text", texts),
        "texts": ("text", texts / "**" / "*.txt"),
    }


def save_to_disk(folder: Path, table: Any, num_files: int = 2) -> None:
    """As ``datasets`` does: streams of record batches, and a state.json that has their order."""
    folder.mkdir()
    names = [f"data-{number:05d}-of-{num_files:05d}.arrow" for number in range(num_files)]
    each = -(-table.num_rows // num_files)
    for number, name in enumerate(names):
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table.slice(number * each, each), 5)
    state = {"_data_files": [{"filename": name} for name in names], "_format_columns": None}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")


def job_of(source: str, path: Path | str, tokenizer: Path, **more: Any) -> Job:
    """A small job on prepared data; ``more`` of its ``[data]``."""
    data = {"source": source, "path": str(path), "tokenizer": str(tokenizer), **more}
    train = {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 16}
    return parse_job({"name": "small", "train": train, "data": data})


def expected(tokenizer: Path, documents: Sequence[str] = DOCUMENTS) -> Iterator[list[int]]:
    """The tokens of each document, by ``tokenizers`` alone."""
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    eos = loaded.token_to_id(EOS)
    for text in documents:
        yield [*loaded.encode(text, add_special_tokens=False).ids, eos]
