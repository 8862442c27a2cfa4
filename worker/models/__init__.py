"""Models as layers: any proven Hugging Face language model, cut into embedding, blocks and head.

Owns configuration, structure, fresh weights and the layers that compute. Does not own training state:
the tensors that layers compute with belong to the caller (``worker.state.store``).
"""

# Before anything imports transformers.
from worker.models import light as light  # isort: skip
from worker.models.config import FAMILIES, MASKED, load_config
from worker.models.deferral import Owed
from worker.models.layer import Batch, Layer, gradients, input_gradients, seed_layer
from worker.models.spec import Bucket, ModelSpec, load_spec

__all__ = [
    "FAMILIES",
    "MASKED",
    "Batch",
    "Bucket",
    "Layer",
    "ModelSpec",
    "Owed",
    "gradients",
    "input_gradients",
    "load_config",
    "load_spec",
    "seed_layer",
]
