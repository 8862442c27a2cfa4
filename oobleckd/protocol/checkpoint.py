"""The manifest of a checkpoint: what makes a folder of bucket files one, shared by core, daemon and worker.

Owns the manifest's shape and the folder's name. Pure; what is done to the files is ``host.checkpoint``'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from oobleckd.protocol.checkpointmessages import CheckpointPart
from oobleckd.protocol.inputs import Inputs, corpus_of, of_corpus
from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import Counters

FORMAT = 2
OLDEST_FORMAT = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"
DAMAGED = ".damaged"
TEMPORARY = ".tmp"


class BucketFile(msgspec.Struct, frozen=True):
    """One bucket: ``file`` in the folder, its size and SHA-256, and the SHA-256 of each tensor by name."""

    bucket: int
    file: str
    num_bytes: int
    sha256: str
    tensors: dict[str, str]


class Manifest(msgspec.Struct, frozen=True):
    """A whole checkpoint. ``model`` is ``model_digest`` of ``spec``, the job that wrote it.

    ``corpus`` is the digest of the text ("": nobody had read all of it yet): two runs on different texts
    cannot be compared. ``inputs`` is all that the job read, by its identity (format 1 has the corpus alone).
    """

    format: int
    model: str
    counters: Counters
    buckets: tuple[BucketFile, ...]
    spec: Job
    corpus: str = ""
    inputs: Inputs = ()

    @property
    def read(self) -> Inputs:
        """What the job had read, as far as the manifest knows."""
        return self.inputs or of_corpus(self.corpus)


def step_name(step: int) -> str:
    """Name of the folder with the state after ``step`` steps."""
    return f"step-{step:08d}"


def model_digest(job: Job) -> str:
    """Identity of the model that ``job`` trains: its family and configuration, 32 hex digits."""
    identity = {"family": job.model.family, "config": job.model.config}
    return hashlib.blake2b(msgspec.json.encode(identity, order="deterministic"), digest_size=16).hexdigest()


def manifest_of(job: Job, parts: Sequence[CheckpointPart], inputs: Inputs = ()) -> Manifest:
    """The manifest of a checkpoint whose parts, one for every bucket, have all arrived. ``inputs``: what the
    job reads.
    """
    assert len({part.bucket for part in parts}) == len(parts) == parts[0].num_buckets
    assert len({(part.counters, part.directory) for part in parts}) == 1
    files = [
        BucketFile(part.bucket, part.file, part.num_bytes, part.sha256, part.tensors)
        for part in sorted(parts, key=lambda part: part.bucket)
    ]
    corpus = corpus_of(inputs) or next((part.corpus for part in parts if part.corpus), "")
    return Manifest(FORMAT, model_digest(job), parts[0].counters, tuple(files), job, corpus, inputs)
