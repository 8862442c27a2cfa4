"""The one job that every system of the benchmarks trains: a GPT-2 of 6.5 M parameters over bytes.

Owns numbers only, so that ``throughput.py``, ``recovery.py`` and the peers' programs (which run in
environments without this project) cannot differ. In the environment: ``OOBLECK_BENCH_SMALL`` is for trying
the scripts out; by ``OOBLECK_BENCH_TOKENS`` a peer's program is told the tokens of a micro-batch, which the
script that starts it was asked for; ``OOBLECK_BENCH_ASLEEP_S`` takes next to none, for layers that sleep so
long.
"""

from __future__ import annotations

import os
from typing import NamedTuple

SMALL = bool(os.environ.get("OOBLECK_BENCH_SMALL"))
ASLEEP_S = float(os.environ.get("OOBLECK_BENCH_ASLEEP_S", "0"))
NUM_LAYERS = 8
WIDTH = 32 if ASLEEP_S else 64 if SMALL else 256
NUM_HEADS = 8
VOCABULARY = 256
TOKENS = "OOBLECK_BENCH_TOKENS"
NUM_MICRO_BATCHES = 8
NUM_PROCESSES = 4
LEARNING_RATE = 3e-4
CHECKPOINT_EVERY = 10
"""Steps between the checkpoints of a job that torchrun restarts; saving one takes a tenth of a step."""


class MicroBatch(NamedTuple):
    """``num`` sequences of so many tokens each."""

    num: int
    sequence: int

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return NUM_MICRO_BATCHES * self.num


MICRO_BATCHES = {128: MicroBatch(2, 64), 1024: MicroBatch(1, 1024)}
"""By their tokens; the larger is of GPT-2's own context."""
HERE = MicroBatch(1, 8) if ASLEEP_S else MICRO_BATCHES[int(os.environ.get(TOKENS, "128"))]
"""What this program has where nothing else is said."""
MICRO_BATCH, SEQUENCE, GLOBAL_BATCH = HERE.num, HERE.sequence, HERE.global_batch


def gpt2_config(sequence: int = SEQUENCE) -> dict[str, bool | int | float]:
    """Fields of transformers' ``GPT2Config``: no dropout, head and embedding untied, ``sequence`` tokens
    of context.
    """
    return {
        "n_layer": NUM_LAYERS, "n_embd": WIDTH, "n_head": NUM_HEADS, "vocab_size": VOCABULARY,
        "n_positions": sequence, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
