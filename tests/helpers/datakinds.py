"""The kinds of data that jobs of a real cluster train on; as nobody remembers which sample comes next, none
of them may show in what a failure does.

Owns their names, and the files of each, which are made once under a cluster's folder: token numbers drawn by
a seed, below 256.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from oobleckd.protocol.job import jobs_of_sources
from tests.helpers.cluster import tiny_job
from tests.helpers.prepared import planned, prepared

KINDS = ("bytes", "packed", "chats", "mixture")
"""Packed: with separate documents. Chats: the loss asks for some of their tokens. Mixture: of two sources of
text and one of chats, packed, whose weights change.
"""
MIXES_AT = 6
"""The step in which they do."""
EVALUATES_EVERY = 3
"""Steps of a job that evaluates."""
_HELD_OUT = {"held_out": 0.25}
_LONGEST = 50
"""Tokens of a document, more than of a row: some are cut."""


def data_of(kind: str, folder: Path) -> dict[str, Any]:
    """`[data]` of a job on such data, whose files lie under ``folder``."""
    if kind == "bytes":
        return {}
    place = folder / f"data-{kind}"
    noted = place / "data.json"
    if not noted.exists():
        place.mkdir()
        data = _DATA[kind](place)
        for more in ({}, {"eval": _HELD_OUT}):  # plans of rows for jobs that hold documents out, too
            for _, part in jobs_of_sources(tiny_job("planned", data=data, **more)):
                planned(part)
        noted.write_bytes(msgspec.json.encode(data))
    found: dict[str, Any] = msgspec.json.decode(noted.read_bytes())
    return found


def eval_of(kind: str, folder: Path) -> dict[str, Any]:
    """`[eval]` of a job on such data: documents that are held out of packed ones, else two texts of its own.
    Each evaluation is of several rounds, the last of which has fewer micro-batches.
    """
    usual: dict[str, Any] = {"every": EVALUATES_EVERY, "sequences": 16, "at_start": True}
    if kind == "packed":
        return usual | _HELD_OUT
    make = _text if kind == "bytes" else _rows
    return usual | {"source": [make(folder, name, seed) for seed, name in enumerate(("prose", "verse"))]}


def _text(folder: Path, name: str, seed: int) -> dict[str, Any]:
    """An evaluation source of bytes drawn by a seed."""
    file = folder / f"{name}.txt"
    if not file.exists():
        file.write_bytes(np.random.default_rng(seed).integers(0, 256, 2000, np.uint8).tobytes())
    return {"name": name, "kind": "text", "path": str(file)}


def _rows(folder: Path, name: str, seed: int) -> dict[str, Any]:
    """An evaluation source of packed rows."""
    place = folder / "data-eval"
    noted = place / f"{name}.json"
    if not noted.exists():
        place.mkdir(exist_ok=True)
        source = {**_source(place, 16 + seed), "source": "jsonl", "tokenizer": "/none", "sequences": "packed"}
        planned(tiny_job("planned", data=source))
        noted.write_bytes(msgspec.json.encode(source))
    found: dict[str, Any] = msgspec.json.decode(noted.read_bytes())
    return {"name": name, "kind": "jsonl", "path": found["path"], "prepared": found["prepared"]}


def _packed(place: Path) -> dict[str, Any]:
    return {**_source(place, 1), "source": "jsonl", "tokenizer": "/none", "sequences": "packed"}


def _chats(place: Path) -> dict[str, Any]:
    data = {**_source(place, 2, chats=True), "source": "jsonl", "tokenizer": "/none"}
    return data | {"on_long_document": "cut"}


def _mixture(place: Path) -> dict[str, Any]:
    sources = [
        {"name": "web", "kind": "jsonl", "weight": 0.7, **_source(place, 3)},
        {"name": "talk", "kind": "jsonl", "weight": 0.3, **_source(place, 4, chats=True)},
        {"name": "wiki", "kind": "jsonl", "weight": 0, **_source(place, 5)},
    ]
    sources[-1] |= {"epochs": 1, "at_limit": "drop"}
    stage = {"from_step": MIXES_AT, "weights": {"web": 0.25, "talk": 0.25, "wiki": 0.5}}
    return {"source": sources, "tokenizer": "/none", "stage": [stage], "on_long_document": "cut"}


def _source(place: Path, seed: int, *, chats: bool = False) -> dict[str, Any]:
    """A prepared folder; of chats the loss asks for the later part of each document."""
    dice = np.random.default_rng(seed)
    lengths = dice.integers(1, _LONGEST, 200)
    documents = [dice.integers(0, 256, length) for length in lengths]
    asked = [np.arange(length) >= dice.integers(0, length) for length in lengths] if chats else []
    folder = prepared(place / f"{seed:032x}", documents, "uint16", asked=asked)
    return {"path": "/none", "prepared": str(folder), **({"format": "chat"} if chats else {})}


_DATA = {"packed": _packed, "chats": _chats, "mixture": _mixture}
