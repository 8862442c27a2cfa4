"""Folders as ``oobleckctl data prepare`` makes them, of token numbers that a test gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oobleckd.prepare.plans import plans_of
from oobleckd.protocol.job import Job
from oobleckd.tokens.asked import AskedWriter
from oobleckd.tokens.dtypes import NAMED
from oobleckd.tokens.index import write_index
from oobleckd.tokens.manifest import (
    FORMAT_OF_CHATS,
    INDEX,
    LOSS,
    TOKENS,
    BadRow,
    Manifest,
    SourceFile,
    checksums,
    read_manifest,
    write_manifest,
)
from oobleckd.tokens.packing import rule_of
from oobleckd.tokens.plan import plan_folder


def prepared(
    folder: Path,
    documents: Sequence[npt.NDArray[Any]],
    dtype: str,
    *,
    bad_rows: Sequence[tuple[str, int, str]] = (),
    asked: Sequence[npt.NDArray[np.bool_]] = (),
    **fields: Any,
) -> Path:
    """``folder`` with ``documents``; ``asked``: tokens of chats that the loss asks for; ``fields`` of its
    manifest that are to be others.
    """
    folder.mkdir(parents=True)
    tokens = np.concatenate(documents) if documents else np.zeros(0)
    tokens.astype(NAMED[dtype]).tofile(folder / TOKENS)
    write_index(folder / INDEX, NAMED[dtype], np.array([len(each) for each in documents], np.int32))
    if asked:
        fields |= _loss_of(folder, np.concatenate(asked))
    bin_sha256, crcs = checksums(folder / TOKENS)
    manifest = Manifest(
        digest=folder.name,
        dtype=dtype,
        tokens=len(tokens),
        documents=len(documents),
        largest=int(tokens.max()) if len(tokens) else -1,
        bin_sha256=bin_sha256,
        idx_sha256=checksums(folder / INDEX)[0],
        idx_bytes=(folder / INDEX).stat().st_size,
        crcs=crcs,
        sources=(SourceFile("a.jsonl", 3, 5, "00"),),
        bad_rows=tuple(BadRow(*each) for each in bad_rows),
        num_bad_rows=len(bad_rows),
        **fields,
    )
    write_manifest(folder, manifest)
    return folder


def _loss_of(folder: Path, asked: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Write the loss.bin of ``folder``; what its manifest says of it."""
    with (folder / LOSS).open("wb") as file:
        writer = AskedWriter(file)
        writer.add(asked)
        writer.end()
    sha256, crcs = checksums(folder / LOSS)
    return {
        "asked": int(asked.sum()),
        "loss_sha256": sha256,
        "loss_crcs": crcs,
        "format": FORMAT_OF_CHATS,
    }


def planned(job: Job) -> Path:
    """Where the plan of ``job``, on one prepared folder, lies: made by now."""
    folder, rule = Path(job.data.prepared), rule_of(job)
    assert rule is not None
    manifest = read_manifest(folder)
    plans_of(job, folder, manifest)
    return plan_folder(folder, manifest, rule)
