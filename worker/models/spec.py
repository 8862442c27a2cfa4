"""The model of a job as buckets of parameters and layers that compute with them.

Owns the numbering that all devices share, a pure function of the job. Bucket ``i`` holds the parameters
of layer ``i`` alone; after those comes one bucket for every parameter that several layers share (a tied
weight), which is in no other bucket. A layer all of whose parameters are shared has an empty bucket (a
Llama embedding with tied weights): it is treated like any other, so that its ledger is checked too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from oobleckd.protocol.job import Job
from oobleckd.protocol.modelnotes import FolderNote, note_of
from oobleckd.worker.models.compiled import compiled
from oobleckd.worker.models.config import TIED, first_position, load_config
from oobleckd.worker.models.experts.grouped import (
    ShapesAlone,
    check_precision,
    idle_params,
    params_of_experts,
)
from oobleckd.worker.models.folders.folder import Folder
from oobleckd.worker.models.folders.names import saved
from oobleckd.worker.models.heads.chunked import ChunkedHead
from oobleckd.worker.models.layer import Batch, Layer
from oobleckd.worker.models.routers import (
    NUM_LOSSES,
    BlockRouter,
    Coefficients,
    check_coefficients,
    places_of,
)
from oobleckd.worker.models.separate import check_apart, record
from oobleckd.worker.models.split import Call, CallRecorder, Split, split
from oobleckd.worker.models.weights import fresh
from oobleckd.worker.runtime.errors import UserError

_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class Bucket(msgspec.Struct, frozen=True):
    """Parameters that are reduced, updated, copied and checkpointed together.

    ``keys`` are names in the undivided model; ``uses`` the layers that compute with them.
    """

    index: int
    keys: tuple[str, ...]
    uses: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


class ModelSpec:
    """The model of ``job``: what its parameters are called, where they come from, how its layers compute.

    ``notes``: what is to be said of the folder that it starts from.
    """

    def __init__(self, job: Job, config: PretrainedConfig) -> None:
        self.job = job
        self.config = config
        self._split: Split = split(config) if job.model.checkpoint else _split_of(config)
        self._check_loss()
        self._folder = self._open_folder()
        self.notes: tuple[FolderNote, ...] = () if self._folder is None else self._folder.notes
        self.notes += self._router_notes()
        if self._folder is not None and self._folder.apart:
            self._untie(self._folder.apart)
        self._routers = places_of(self._split.model, self._split.blocks)
        check_coefficients(job.train, job.model.family, self._routers)
        check_precision(job.train, job.model.family, self._split.model)
        self.buckets = _buckets(self._split)
        self._constants = self._split.constants()
        self._of_layer = tuple(
            tuple(bucket.index for bucket in self.buckets if layer in bucket.uses)
            for layer in range(self.num_layers)
        )
        self._recorders: dict[torch.device, CallRecorder] = {}
        self._calls: dict[torch.device, tuple[Call, ...]] = {}
        self._rounded: tuple[frozenset[str], ...] = ()

    @property
    def num_layers(self) -> int:
        """Embedding, blocks and head."""
        return self._split.num_layers

    @property
    def num_weights(self) -> int:
        """Weights of matrix products that a token goes through outside of the embedding, the output
        projection's among them: whatever has two dimensions or more, and of experts its share.
        """
        experts = idle_params(self._split.model)
        buckets = (bucket for of_layer in self._of_layer[1:] for bucket in of_layer)
        keys = (key for bucket in buckets for key in self.buckets[bucket].keys)
        params = map(self._split.model.get_parameter, keys)
        least = {id(param): 3 for param in experts}  # what has two there is a bias of each
        weights = (param for param in params if param.dim() >= least.get(id(param), 2))
        return sum(param.numel() - experts.get(param, 0) for param in weights)

    @property
    def num_params(self) -> int:
        """Parameters of the model; a tied weight counts once."""
        return sum(param.numel() for param in self._split.model.parameters())

    @property
    def num_active_params(self) -> int:
        """Those that a token goes through, with all of the embedding."""
        return self.num_params - sum(idle_params(self._split.model).values())

    @property
    def attention(self) -> int:
        """How wide all query heads of a block are together; where values are of another width, the average of
        the two.
        """
        heads: int = self.config.num_attention_heads
        latent = [getattr(self.config, name, 0) for name in _LATENT]
        if all(latent):
            return heads * sum(latent) // 2
        of_head: int = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        return heads * of_head

    @property
    def architecture(self) -> str:
        """The class in transformers whose parameters the buckets name."""
        return type(self._split.model).__name__

    def try_blocks(self) -> None:
        """Find out without weights whether its blocks can compute, and keep documents apart where they are
        to. Raises UserError.
        """
        self._split.try_blocks()
        if self.job.data.is_separate:
            positions, documents = torch.tensor([[0, 1, 0]]), torch.tensor([[0, 0, 1]])
            check_apart(tuple(self.calls(positions, documents).values()), documents)

    @property
    def constants(self) -> dict[str, tuple[int, ...]]:
        """Shapes, by name, of what a saved model has besides parameters, and nothing trains."""
        return {name: tuple(buffer.shape) for name, buffer in self._constants.items()}

    def constant(self, name: str) -> Tensor:
        """One of ``constants``, float32, on the CPU: from the job's checkpoint folder, or as a fresh model
        has it. Raises UserError when the folder cannot be read.
        """
        if self._folder is not None and self._folder.has(name):
            return self._folder.read(name)
        return self._split.initial(name)

    def layer_of(self, name: str) -> int:
        """The layer that computes with the parameter or constant ``name``."""
        return self._split.layer_of(name)

    def as_saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tensors``, all of a layer by name, as ``save_pretrained`` would write them: experts one by one,
        say.
        """
        with ShapesAlone():
            return saved(self._split.model, tensors)

    def buckets_of(self, layer: int) -> tuple[int, ...]:
        """The buckets that ``layer`` uses, ascending."""
        return self._of_layer[layer]

    def num_experts(self, layer: int) -> int:
        """Among how many experts the router of ``layer`` chooses; 0: it has none."""
        place = self._routers[layer - 1] if 0 < layer < self.num_layers - 1 else None
        return 0 if place is None else place.num_experts

    def num_told(self, layer: int) -> int:
        """How many numbers of each micro-batch are told of ``layer`` beside its gradients: of the head the
        loss, of a block with a router what ``BlockRouter.told`` has.
        """
        if layer == self.num_layers - 1:
            return 1
        experts = self.num_experts(layer)
        return NUM_LOSSES + experts if experts else 0

    def init(self, bucket: int, device: torch.device) -> list[Tensor]:
        """Weights of ``bucket`` before the first step, float32, in key order, each in memory of its own.

        They depend on the job's seed and the keys alone, or come from the job's checkpoint folder. Raises
        UserError when that cannot be read.
        """
        keys, folder = self.buckets[bucket].keys, self._folder
        values = self._fresh(tuple(key for key in keys if folder is None or not folder.has(key)))

        def read(key: str) -> Tensor:
            # One at a time: all experts of a block are gigabytes.
            value = values.pop(key) if folder is None or key in values else folder.read(key)
            return torch.empty(value.shape, device=device).copy_(value)

        return [read(key) for key in keys]

    def layer(self, layer: int, params: Mapping[str, Tensor], device: torch.device) -> Layer:
        """Layer ``layer`` on ``device``, computing with the leaf tensors ``params`` (by key) themselves: of
        float32, or, of keys in ``rounded``, of bfloat16. Raises UserError where it is to be compiled and
        nothing can be here.
        """
        meta = self._split.model
        real = {id(meta.get_parameter(key)): leaf for key, leaf in params.items()}
        # Made anew they are zeros, with which a router chooses other experts. (D-models-015)
        stored = [name for name in self._constants if self.layer_of(name) == layer]
        real |= {id(meta.get_buffer(name)): self.constant(name).to(device) for name in stored}
        order = tuple(
            (bucket, position, params[key])
            for bucket in self.buckets_of(layer)
            for position, key in enumerate(self.buckets[bucket].keys)
        )
        is_head = layer == self.num_layers - 1
        call = None
        if layer == 0:
            module = self._split.embedding(real, device)
        elif is_head:
            module = self._head(real, device)
        else:
            module = self._split.block(layer - 1, real, device)
            call = None if self.job.data.is_separate else self._joined_calls(device)[layer - 1]
        assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        first = first_position(self.job.model.family, self.config)
        # Weight gradients of a head in chunks are there when its forward is over.
        apart = self.job.schedule.apart and not isinstance(module, ChunkedHead)
        eager = layer == 0 or not self.job.train.compile or isinstance(module, ChunkedHead)
        run = None if eager else compiled(module, device, is_head=is_head)
        router = self._router(layer, module)
        return Layer(layer, order, module, device, self._bf16, call, is_head, apart, first, run, router)

    def _router(self, layer: int, module: nn.Module) -> BlockRouter | None:
        place = self._routers[layer - 1] if self.num_experts(layer) else None
        train = self.job.train
        of_losses = Coefficients(train.router_aux_loss_coef, train.router_z_loss_coef)
        return None if place is None else BlockRouter(module, place, of_losses)

    def _head(self, real: dict[int, Tensor], device: torch.device) -> nn.Module:
        size = self.job.train.loss_chunk_size
        if not size:
            return self._split.head(real, device)
        return ChunkedHead(*self._split.head_in_parts(real, device), size)

    def _check_loss(self) -> None:
        # The loop knows the loss of a next token alone; a family with another one would be trained on
        # something else.
        found = self._split.model.loss_function
        if self.job.train.loss_chunk_size and found is not ForCausalLMLoss:
            raise UserError(
                f"train.loss_chunk_size: the loss of {self.job.model.family} is transformers' "
                f"{found.__name__}, and only {ForCausalLMLoss.__name__} is computed in chunks",
                "leave train.loss_chunk_size out, or train a causal model",
            )

    def calls(self, positions: Tensor, documents: Tensor) -> dict[int, Call]:
        """What each block is called with, by its layer, for a micro-batch with these ``positions`` and
        ``documents``, on the device where they are (``Batch``). A pure function of the two.
        """
        dtype = torch.bfloat16 if self._bf16 else torch.float32
        device, config = positions.device, self._split.model.config
        if device not in self._recorders:
            self._recorders[device] = self._split.recorder(device)
        with self._precision(device):
            calls = record(self._recorders[device], config, positions, documents, dtype)
        return dict(enumerate(calls, start=1))

    def rounded(self, layer: int) -> frozenset[str]:
        """Keys that autocast would round to bfloat16 whenever ``layer`` computes with them, and that it does
        nothing else with: a copy of them that is rounded already, made once, gives the same bits. A head in
        chunks adds up their gradients in float32, so it has none. With them, where the job has its experts in
        bfloat16, all that these compute with.
        """
        chunked = bool(self.job.train.loss_chunk_size) and layer == self.num_layers - 1
        if not self._bf16 or chunked:
            return frozenset()
        if not self._rounded:
            model, keys = self._split.model, [self._keys_of(each) for each in range(self.num_layers)]
            products, experts = self._split.products(), self._rounded_experts()
            self._rounded = tuple(
                frozenset(key for key in of_layer if id(model.get_parameter(key)) in ids | experts)
                for of_layer, ids in zip(keys, products, strict=True)
            )
        return self._rounded[layer]

    def _rounded_experts(self) -> frozenset[int]:
        """Ids of the parameters of experts that autocast leaves alone, and this job does not."""
        # What goes into them and comes out follows from their dtype. (D-models-016)
        if self.job.train.experts_precision != "bf16":
            return frozenset()
        return frozenset(map(id, params_of_experts(self._split.model)))

    def calls_for(self, batch: Batch) -> dict[int, Call]:
        """What each block is called with, by its layer, for ``batch``, which may have another shape than the
        job's micro-batches, on the device where it is.
        """
        if batch.positions is not None and batch.documents is not None:
            return self.calls(batch.positions, batch.documents)
        device, (rows, length) = batch.inputs.device, batch.inputs.shape
        with self._precision(device):
            return dict(enumerate(self._split.recorder(device)((rows, length)), start=1))

    def run_on_meta(self, layer: int, call: Call, shape: tuple[int, int]) -> None:
        """A block on the meta device, which computes shapes alone, with hidden states of ``shape`` (batch,
        sequence).
        """
        self._split.run_on_meta(layer - 1, call, shape)

    def attention_kind(self, layer: int) -> str:
        """What the configuration says of the attention of a block ("sliding_attention"); "" where it says
        nothing, or has the same for all.
        """
        told = getattr(self.config, "layer_types", None) or ()
        return str(told[layer - 1]) if layer <= len(told) else ""

    def kind_of(self, layer: int) -> str:
        """Blocks of one kind compute alike: the names of a block's module classes, in order."""
        return self._split.kind_of(layer - 1)

    def _keys_of(self, layer: int) -> tuple[str, ...]:
        return tuple(key for bucket in self.buckets_of(layer) for key in self.buckets[bucket].keys)

    @property
    def _bf16(self) -> bool:
        return self.job.train.precision == "bf16"

    def _precision(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled=self._bf16)

    def _joined_calls(self, device: torch.device) -> tuple[Call, ...]:
        """What each block is called with where documents are joined: the same for every micro-batch."""
        if device not in self._calls:
            train = self.job.train
            with self._precision(device):
                self._calls[device] = self._split.recorder(device)((train.micro_batch, train.sequence))
        return self._calls[device]

    def _fresh(self, keys: tuple[str, ...]) -> dict[str, Tensor]:
        by_root: dict[str, list[str]] = {}
        for key in keys:
            by_root.setdefault(self._split.root_of(key), []).append(key)
        values: dict[str, Tensor] = {}
        for root, names in by_root.items():
            values |= fresh(self._split.model, root, tuple(names), self.job.train.seed)
        return values

    def _router_notes(self) -> tuple[FolderNote, ...]:
        """Who goes on from a folder may expect the router loss that its configuration names."""
        of_folder = getattr(self.config, "router_aux_loss_coef", None)
        if self._folder is None or not of_folder or self.job.train.router_aux_loss_coef:
            return ()
        return (note_of("router-loss", [f"router_aux_loss_coef = {of_folder}"]),)

    def _open_folder(self) -> Folder | None:
        if not self.job.model.checkpoint:
            return None
        model, blocks = self._split.model, {id(param) for param in self._split.blocks.parameters()}
        keys = [name for name, param in model.named_parameters() if id(param) in blocks]
        return Folder(Path(self.job.model.checkpoint), model, keys)

    def _untie(self, apart: tuple[tuple[str, str], ...]) -> None:
        """As transformers: what a folder has two different values for is not tied, whatever its configuration
        says.
        """
        if self.job.model.family in TIED:
            one, other = apart[0]
            raise UserError(
                f"model.checkpoint: {self.job.model.checkpoint} has different values for {one} and {other}, "
                "and "
                f"{self.job.model.family} is trained with tied embeddings alone",
                "remove one of the two from the folder",
            )
        self.config.tie_word_embeddings = False
        self._split = split(self.config)
        self._folder = self._open_folder()
        self.notes = (note_of("apart", [name for pair in apart for name in pair]), *self.notes)


def load_spec(job: Job) -> ModelSpec:
    """The model of ``job``. Raises UserError naming the key of job.toml, or the file, that is wrong."""
    return ModelSpec(job, load_config(job))


_last: list[tuple[type[PretrainedConfig], str, Split]] = []


def _split_of(config: PretrainedConfig) -> Split:
    """``split``, which takes 40 ms and more: of the model that was cut last it is the same one, which nobody
    writes to. A device measures a model, and then begins job after job with it.
    """
    kind, fields = type(config), config.to_json_string(use_diff=False)
    for known_kind, known_fields, cut in _last:
        if (known_kind, known_fields) == (kind, fields):
            return cut
    cut = split(config)
    _last[:] = [(kind, fields, cut)]
    return cut


def _buckets(cut: Split) -> tuple[Bucket, ...]:
    key_of = _keys(cut.model)
    uses: dict[str, set[int]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, param in cut.model.named_parameters(remove_duplicate=False):
        key = key_of[id(param)]
        uses.setdefault(key, set()).add(cut.layer_of(name))
        shapes[key] = tuple(param.shape)
    own: list[list[str]] = [[] for _ in range(cut.num_layers)]
    for key, layers in uses.items():
        if len(layers) == 1:
            own[min(layers)].append(key)
    shared = [key for key, layers in uses.items() if len(layers) > 1]
    groups: list[tuple[tuple[str, ...], tuple[int, ...]]]
    groups = [(tuple(keys), (layer,)) for layer, keys in enumerate(own)]
    groups += [((key,), tuple(sorted(uses[key]))) for key in shared]
    return tuple(
        Bucket(index, keys, layers, tuple(shapes[key] for key in keys))
        for index, (keys, layers) in enumerate(groups)
    )


def _keys(model: PreTrainedModel) -> dict[int, str]:
    """One name for each parameter, by its id: of a tied one the name under which transformers saves it."""
    keys: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in keys or keys[id(param)] in model.all_tied_weights_keys:
            keys[id(param)] = name
    return keys
