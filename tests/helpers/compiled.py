"""A small job that compiles, and what its layers come to in a process with a folder of its own.

python -m tests.helpers.compiled FOLDER: prints that of a block.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import msgspec
import torch

from oobleckd.protocol.job import Job
from oobleckd.worker.models import Batch, gradients, load_spec, seed_layer
from oobleckd.worker.models.compiled import keep_in
from tests.helpers.engine_jobs import job
from tests.helpers.models import CPU, all_layers, all_params, small_config


def compiling(tmp_path: Path) -> Job:
    """As that of the engine's tests, of a family of whose blocks torch makes few programs: each takes the
    compiler a second.
    """
    plain = job(tmp_path)
    config = small_config("olmo", vocab_size=128, hidden_size=16)
    return msgspec.structs.replace(
        plain,
        model=msgspec.structs.replace(plain.model, family="olmo", config=config),
        train=msgspec.structs.replace(plain.train, compile=True),
    )


def digest_of(spec_job: Job, index: int, *, backward: bool = True, wants: bool = True) -> str:
    """Of the output of a layer behind the embedding for one micro-batch, and of all gradients; ``wants``:
    whether that of its input is one that anybody asks for.
    """
    spec = load_spec(spec_job)
    layer = all_layers(spec, all_params(spec))[index]
    train = spec_job.train
    shape = (train.micro_batch, train.sequence, spec.config.hidden_size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_(wants)
    tokens = torch.arange(train.micro_batch * train.sequence).reshape(shape[:2])
    seed_layer(train.seed, 0, 0, index, CPU)
    with torch.set_grad_enabled(backward):
        out = layer(x, Batch(tokens, tokens))
    found = [out.detach()]
    if backward:
        found += gradients(out, [*layer.leaves, *([x] if wants else [])], torch.ones_like(out))
    digest = hashlib.blake2b(digest_size=8)
    for tensor in found:
        digest.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    keep_in(folder / "kept")
    print(digest_of(compiling(folder), int(sys.argv[2])))
