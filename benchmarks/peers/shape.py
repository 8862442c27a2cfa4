"""The one job that every system of the benchmarks trains: a GPT-2 of 6.5 M parameters over bytes.

Owns numbers only, so that ``throughput.py``, ``recovery.py`` and the peers' programs (which run in
environments without this project) cannot differ. ``OOBLECK_BENCH_SMALL`` in the environment is for trying the
scripts out; ``OOBLECK_BENCH_LONG`` takes samples of GPT-2's own context, one a micro-batch;
``OOBLECK_BENCH_ASLEEP_S`` next to nothing, for layers that sleep so long.
"""

from __future__ import annotations

import os

SMALL = bool(os.environ.get("OOBLECK_BENCH_SMALL"))
ASLEEP_S = float(os.environ.get("OOBLECK_BENCH_ASLEEP_S", "0"))
NUM_LAYERS = 8
WIDTH = 32 if ASLEEP_S else 64 if SMALL else 256
NUM_HEADS = 8
VOCABULARY = 256
LONG = bool(os.environ.get("OOBLECK_BENCH_LONG"))
SEQUENCE = 8 if ASLEEP_S else 1024 if LONG else 64
GLOBAL_BATCH = 8 if LONG or ASLEEP_S else 16
MICRO_BATCH = 1 if LONG or ASLEEP_S else 2
NUM_PROCESSES = 4
LEARNING_RATE = 3e-4
CHECKPOINT_EVERY = 10
"""Steps between the checkpoints of a job that torchrun restarts; saving one takes a tenth of a step."""


def gpt2_config() -> dict[str, bool | int | float]:
    """Fields of transformers' ``GPT2Config``: no dropout, head and embedding untied."""
    return {
        "n_layer": NUM_LAYERS, "n_embd": WIDTH, "n_head": NUM_HEADS, "vocab_size": VOCABULARY,
        "n_positions": SEQUENCE, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
