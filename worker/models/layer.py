"""One layer at work: computes with tensors that it is given and keeps no state of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable

from oobleckd.worker.models.compiled import Compiled
from oobleckd.worker.models.deferral import Deferral, Owed
from oobleckd.worker.models.routers import BlockRouter
from oobleckd.worker.models.separate import without_masks
from oobleckd.worker.models.split import Call
from oobleckd.worker.models.strict import WholeSums


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch, int64 (batch, sequence): the tokens that the embedding sees, and those that the head has
    to name. A causal model is given the same for both, since it names the next token at every position; -100
    stands for a token that is not asked for.

    ``positions``, ``documents``: where documents of a row are kept apart, the position of each token in its
    document, and the number of that document in the row, both from 0; what fills the row up is a document of
    its own. ``num_targets``: how many tokens are asked for; 0 in a job all of whose micro-batches ask for
    equally many.
    """

    inputs: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    num_targets: int = 0

    def with_a_target(self) -> Batch:
        """The same batch, of which one token is asked for. Where nothing is, the loss would be NaN, and so it
        is times a weight of 0.
        """
        labels = self.labels.clone()
        labels[0, -1] = self.inputs[0, -1]
        return replace(self, labels=labels)

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``. Nobody waits for a GPU: it copies from pinned memory, which torch
        keeps until it has.
        """
        sent = partial(_sent, device=device)
        inputs = sent(self.inputs)
        return Batch(
            inputs,
            inputs if self.labels is self.inputs else sent(self.labels),
            None if self.positions is None else sent(self.positions),
            None if self.documents is None else sent(self.documents),
            self.num_targets,
        )


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    # From memory that can be paged out a copy waits until the GPU has done all before it: two waits a
    # micro-batch. (D-devices-022)
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Layer:
    """Layer ``index`` of a model on a device.

    ``params``: (bucket, position in the bucket, leaf), ordered by bucket and position. A leaf is the
    parameter itself, float32, or its copy in bfloat16 (``ModelSpec.rounded``); its gradient has its dtype.
    ``call`` is what a block is called with besides the hidden states; embedding and head have none, nor has a
    block of a job that keeps documents apart, which gets one with every micro-batch. ``apart``: whether
    ``forward_apart`` will be called. ``first_position``: the number of the position at which a row begins.
    ``compiled``: what is called in place of ``module`` (``compiled.compiled``), but by ``evaluate``; None
    where that is called. ``router``: of a block that has one.
    """

    index: int
    params: tuple[tuple[int, int, Tensor], ...]
    module: nn.Module
    device: torch.device
    bf16: bool
    call: Call | None
    is_head: bool
    apart: bool = False
    first_position: int = 0
    compiled: Compiled | None = None
    router: BlockRouter | None = None
    deferral: Deferral = field(default_factory=Deferral)

    def __post_init__(self) -> None:
        if self.apart:
            self.deferral.attach(self.module, self.leaves)

    @property
    def leaves(self) -> list[Tensor]:
        """The parameters, in the order of ``params``."""
        return [leaf for _, _, leaf in self.params]

    def forward_apart(
        self, x: Tensor | None, batch: Batch | None, call: Call | None = None, weight: float = 1.0
    ) -> tuple[Tensor, Owed]:
        """As a call, for a decoupled backward: ``input_gradients`` makes I of it, and then ``Owed.complete``
        W.
        """
        self.deferral.owed = owed = Owed()
        try:
            return self(x, batch, call, weight), owed
        finally:
            self.deferral.owed = None

    def __call__(
        self, x: Tensor | None, batch: Batch | None, call: Call | None = None, weight: float = 1.0
    ) -> Tensor:
        """The embedding takes ``batch``; a block takes ``x`` (batch, sequence, hidden), and ``call`` of the
        micro-batch in place of its own (``ModelSpec.calls``); the head takes ``x`` and ``batch`` and returns
        the mean loss of the micro-batch, a float32 scalar. ``weight``: how much the micro-batch counts, with
        which losses of a router come into the backward pass of its block.
        """
        out = self._computed(x, batch, call)
        if self.router is None or not self.module.training:
            return out
        return self.router.with_losses(out, weight)

    def _computed(self, x: Tensor | None, batch: Batch | None, call: Call | None) -> Tensor:
        compiled = self.compiled if self.module.training else None
        with self._precision():
            if self.index == 0:
                assert batch is not None
                return self._embed(batch)
            if self.is_head:
                assert batch is not None
                if compiled is not None:
                    return compiled(x, batch.labels)
                loss: Tensor = self.module(inputs_embeds=x, labels=batch.labels).loss
                return loss
            call = call or self.call
            assert call is not None, "documents are apart, and the micro-batch says nothing of them"
            args, kwargs = call
            if compiled is not None:
                return compiled(x, *args, **kwargs)
            out: Tensor | tuple[Tensor, ...] = self.module(x, *args, **kwargs)
            return out[0] if isinstance(out, tuple) else out

    def evaluate(self, x: Tensor | None, batch: Batch | None, call: Call | None = None) -> Tensor:
        """As a call, without dropout, and without a graph for a backward."""
        # Each layer is back in train mode before anything else happens: no failure in the middle of an
        # evaluation can leave dropout off in a step.
        self.module.eval()
        try:
            with torch.no_grad():
                return self(x, batch, call)
        finally:
            self.module.train()

    def _embed(self, batch: Batch) -> Tensor:
        inputs = {"input_ids": batch.inputs}
        if batch.positions is not None:
            inputs["position_ids"] = batch.positions + self.first_position
        with WholeSums(), without_masks():
            embedded: Tensor = self.module(**inputs).last_hidden_state
        return embedded

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()


def gradients(out: Tensor, inputs: Sequence[Tensor], g: Tensor | None) -> list[Tensor]:
    """The gradients of ``inputs``, given that of ``out`` (None: ``out`` is the loss, a scalar). Frees the
    graph.
    """
    found = _backward(out, inputs, g, allow_unused=False)
    return [grad for grad in found if grad is not None]


def input_gradients(
    out: Tensor, inputs: Sequence[Tensor], g: Tensor | None, owed: Owed
) -> list[Tensor | None]:
    """I of ``forward_apart``: as ``gradients``; None for inputs whose gradient is left to W, all
    or in part.
    """
    found = _backward(out, [*inputs, *owed.edges], g, allow_unused=True)
    owed.keep(found[len(inputs) :])
    return list(found[: len(inputs)])


def _backward(
    out: Tensor, inputs: Sequence[Tensor | GradientEdge], g: Tensor | None, *, allow_unused: bool
) -> Sequence[Tensor | None]:
    """As ``torch.autograd.grad``, by torch's engine itself, which compares the shapes of ``g`` and ``out``
    too.

    ``grad`` compares them as symbols, which costs every process 0.5 s and 30 MB for sympy at its first
    backward pass, and looks at every input twice in Python.
    """
    if not inputs:
        return ()
    engine = Variable._execution_engine  # noqa: SLF001 - what `grad` calls in the end
    found: tuple[Tensor | None, ...] = engine.run_backward(
        (out,),
        (torch.ones_like(out) if g is None else g,),
        False,  # keep the graph
        False,  # make a graph of this
        tuple(inputs),
        allow_unused,
        accumulate_grad=False,
    )
    return found


def seed_layer(job_seed: int, step: int, micro_batch: int, layer: int, device: torch.device) -> None:
    """Seed dropout of one layer and micro-batch on ``device``'s default generator, and on no other's.

    The seed is a hash of all four numbers, so that a micro-batch draws the same whoever computes it.
    """
    text = f"dropout:{job_seed}:{step}:{micro_batch}:{layer}"
    generator(device).manual_seed(hash63(text))


def generator(device: torch.device) -> torch.Generator:
    """The default generator of ``device``."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def hash63(text: str) -> int:
    """A seed from 0 to 2**63 - 1 out of ``text``."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
