"""Models as layers: any proven Hugging Face language model, cut into embedding, blocks and head.

Owns configuration, structure, fresh weights and the layers that compute. Does not own training state:
the tensors that layers compute with belong to the caller (``oobleckd.worker.state.store``).
"""

# Before anything imports transformers.
from oobleckd.worker.models import light as light  # isort: skip
from oobleckd.worker.models.config import FAMILIES, MASKED, load_config
from oobleckd.worker.models.deferral import Owed
from oobleckd.worker.models.layer import Batch, Layer, gradients, input_gradients, seed_layer
from oobleckd.worker.models.separate import tensors_of
from oobleckd.worker.models.spec import Bucket, ModelSpec, load_spec
from oobleckd.worker.models.split import Call

__all__ = [
    "FAMILIES",
    "MASKED",
    "Batch",
    "Bucket",
    "Call",
    "Layer",
    "ModelSpec",
    "Owed",
    "gradients",
    "input_gradients",
    "load_config",
    "load_spec",
    "seed_layer",
    "tensors_of",
]
