"""The generic cut of a Hugging Face language model: found by looking at one run, no adapter per family.

The whole model is built on the meta device: structure without memory. The *body* is the innermost module
around the list of blocks that takes tokens. It is run once with every block replaced by a recorder and every
weight by zeros that take no memory. That run shows what a block is called with besides the hidden states
(masks, rotary angles) and which modules of the body come after the last block (the *tail*). The embedding
layer is then the body without blocks and tail, and the head is the model with its body replaced by the tail.
Plain arithmetic between blocks would be missed, so only families proven bit-equal are let in
(``config.FAMILIES``).

A computing copy of a module is a deep copy whose memo maps every meta tensor to the real one, so that
layers compute with the caller's tensors themselves.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoEModelOutputWithPastAndCrossAttentions

from oobleckd.worker.models import light
from oobleckd.worker.models.config import EXPERTS, MASKED
from oobleckd.worker.models.experts.grouped import ShapesAlone, check_implementation
from oobleckd.worker.models.products import product_parameters
from oobleckd.worker.models.sizes import misfit
from oobleckd.worker.models.strict import WholeSums
from oobleckd.worker.runtime.errors import UserError

Module = TypeVar("Module", bound=nn.Module)

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a block after the hidden states."""


@dataclass(frozen=True, slots=True)
class Split:
    """A model on the meta device and where it is cut. ``places``: of its modules, by their id."""

    model: PreTrainedModel
    body: nn.Module
    blocks: nn.ModuleList
    tail: tuple[nn.Module, ...]
    places: Mapping[int, _Place]

    @property
    def num_layers(self) -> int:
        """Embedding, blocks and head."""
        return len(self.blocks) + 2

    def embedding(self, params: Mapping[int, Tensor], device: torch.device) -> nn.Module:
        """Layer 0, called as ``(input_ids=tokens).last_hidden_state``, with position_ids where documents are
        apart; ``params``: id of meta -> real.
        """
        gone: dict[int, nn.Module] = {id(self.blocks): nn.ModuleList()}
        gone |= {id(module): nn.Identity() for module in self.tail}
        # Only blocks compute with angles, and they have those that were recorded. (D-models-011)
        angles = [module for module in self.body.modules() if "RotaryEmbedding" in type(module).__name__]
        gone |= {id(module): _NoAngles() for module in angles if not list(module.parameters())}
        return _heedless(_real(self.model, self.body, {**params, **gone}, device))

    def block(self, index: int, params: Mapping[int, Tensor], device: torch.device) -> nn.Module:
        """Block ``index``, called as ``(x, *args, **kwargs)`` with what a ``recorder`` found."""
        return _real(self.model, self.blocks[index], params, device)

    def head(self, params: Mapping[int, Tensor], device: torch.device) -> nn.Module:
        """The last layer, called as ``(inputs_embeds=x, labels=tokens).loss``."""
        tail = _real(self.model, _Tail(self.tail), params, device)
        return _real(self.model, self.model, {**params, id(self.body): tail}, device)

    def head_in_parts(
        self, params: Mapping[int, Tensor], device: torch.device
    ) -> tuple[nn.Module, nn.Module]:
        """The last layer as the modules after the last block, called as ``(inputs_embeds=x)``, and what makes
        ``logits`` of their ``last_hidden_state``, called likewise.
        """
        tail = _real(self.model, _Tail(self.tail), params, device)
        return tail, _real(self.model, self.model, {**params, id(self.body): _Tail(())}, device)

    def recorder(self, device: torch.device) -> CallRecorder:
        """What finds out on ``device`` what the blocks are called with."""
        return CallRecorder(self.model, self.body, self.blocks, device)

    def try_blocks(self) -> None:
        """Call a block of each kind on the meta device, which computes shapes alone. Raises UserError where
        they do not fit.
        """
        calls = self.recorder(torch.device("cpu"))((1, 2))
        tried: set[str] = set()
        for index, (block, call) in enumerate(zip(self.blocks, calls, strict=True)):
            if (kind := str(block)) in tried:
                continue
            tried.add(kind)
            self.run_on_meta(index, call, (1, 2))

    def run_on_meta(self, index: int, call: Call, shape: tuple[int, int]) -> None:
        """Block ``index`` on the meta device, with hidden states of ``shape`` (batch, sequence). Raises
        UserError where it cannot be built so.
        """
        args, kwargs = call
        x = torch.empty((*shape, self.model.config.hidden_size), device="meta")
        with _buildable(self.model.config), torch.no_grad(), suppress(NotImplementedError), ShapesAlone():
            self.blocks[index](x, *(_on_meta(each) for each in args), **_on_meta(kwargs))

    def kind_of(self, index: int) -> str:
        """Blocks of one kind compute alike: the names of a block's module classes, in order."""
        return " ".join(type(module).__name__ for module in self.blocks[index].modules())

    def products(self) -> tuple[frozenset[int], ...]:
        """By layer: ids of the parameters on meta that blocks and head use as weights and biases of linear
        products, and for nothing else. Of the embedding none: what it does beside of looking up is little.
        """
        cpu, zero = torch.device("cpu"), torch.zeros(())
        params = {id(param): zero.expand(param.shape) for param in self.model.parameters()}
        x = torch.zeros((1, 2, self.model.config.hidden_size))
        by_kind: dict[tuple[str, ...], frozenset[str]] = {}
        found: list[frozenset[int]] = [frozenset()]
        for index, (args, kwargs) in enumerate(self.recorder(cpu)((1, 2))):
            own = dict(self.blocks[index].named_parameters())
            kind = (self.kind_of(index), *own)
            if kind not in by_kind:
                block = self.block(index, params, cpu)
                by_kind[kind] = product_parameters(block, partial(block, x, *args, **kwargs))
            found.append(frozenset(id(own[name]) for name in by_kind[kind]))
        head, tokens = self.head(params, cpu), torch.zeros((1, 2), dtype=torch.int64)
        names = product_parameters(head, partial(head, inputs_embeds=x, labels=tokens))
        taken = {id(param) for name, param in head.named_parameters() if name in names}
        return (*found, frozenset(meta for meta, param in params.items() if id(param) in taken))

    def constants(self) -> dict[str, Tensor]:
        """Buffers that are saved with the model, on meta, by name: what a router adds to its scores, say. A
        folder may have other values of them than a fresh model (``initial``).
        """
        found: dict[str, Tensor] = {}
        for owner, module in self.model.named_modules():
            kept = module._buffers.keys() - module._non_persistent_buffers_set  # noqa: SLF001
            found |= {f"{owner}.{name}": b for name, b in module.named_buffers(recurse=False) if name in kept}
        return found

    def initial(self, name: str) -> Tensor:
        """The buffer ``name`` as a fresh model has it."""
        buffer = self.model.get_buffer(name)
        owner = self.model.get_submodule(name.rpartition(".")[0])
        return _buffers(self.model, owner, {}, torch.device("cpu"))[id(buffer)]

    def layer_of(self, name: str) -> int:
        """The layer that computes with the parameter or buffer called ``name`` in the undivided model."""
        place = self._place(name)
        if place.block is not None:
            return place.block + 1
        return 0 if place.in_front else self.num_layers - 1

    def root_of(self, name: str) -> str:
        """The module whose initialization decides the parameter ``name``: its block, or else its owner."""
        return self._place(name).root

    def _place(self, name: str) -> _Place:
        return self.places[id(self.model.get_submodule(name.rpartition(".")[0]))]


class _Place(NamedTuple):
    """Of a module: the block that it is in, if any; whether it is in front of them; the name of that block,
    or else its own.
    """

    block: int | None
    in_front: bool
    root: str


def _places(
    model: PreTrainedModel, body: nn.Module, blocks: nn.ModuleList, tail: Sequence[nn.Module]
) -> dict[int, _Place]:
    """Of all modules at once: a model has thousands of parameters, each of which would look through them."""
    names = {id(module): name for name, module in model.named_modules()}
    behind = {id(part) for module in tail for part in module.modules()}
    front = {id(part) for part in body.modules()} - behind
    found = {key: _Place(None, key in front, name) for key, name in names.items()}
    for index, block in reversed([*enumerate(blocks)]):
        place = _Place(index, in_front=False, root=names[id(block)])
        found |= {id(part): place for part in block.modules()}
    return found


def split(config: PretrainedConfig) -> Split:
    """Build the structure of ``config``'s model and find its cut. Raises UserError if it has none."""
    auto = AutoModelForMaskedLM if config.model_type in MASKED else AutoModelForCausalLM
    with _buildable(config):
        with light.without_heavy_parts(), light.without_values(), torch.device("meta"):
            model = auto.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        if config.model_type in EXPERTS:
            check_implementation(model.config)
        model.train()
        body, blocks = _find_blocks(model, config.num_hidden_layers)
        recorder = CallRecorder(model, body, blocks, torch.device("cpu"))
        recorder((1, 2))
    tail = tuple(body.get_submodule(name) for name in recorder.after)
    return Split(model, body, blocks, tail, _places(model, body, blocks, tail))


@contextmanager
def _buildable(config: PretrainedConfig) -> Iterator[None]:
    """Fields that do not fit together show as whatever transformers' and torch's code makes of them."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError) as error:
        if known := misfit(config):
            raise UserError(known, "change one of the two") from error
        raise UserError(
            "model.config: the model cannot be built: "
            f"{' '.join(str(error).split()) or type(error).__name__}",
            "mend the sizes that the message names",
        ) from error


class CallRecorder:
    """The body on ``device`` with weights that take no memory, and blocks that only note what they are called
    with. ``after``: names of the modules that are called after the last block.
    """

    def __init__(
        self, model: PreTrainedModel, body: nn.Module, blocks: nn.ModuleList, device: torch.device
    ) -> None:
        self.after: list[str] = []
        self._device, self._count = device, len(blocks)
        self._calls: list[Call] = []
        self._first: Tensor | None = None
        zero = torch.zeros((), device=device)
        inside = {id(param) for param in blocks.parameters()}
        params = {id(p): p if id(p) in inside else zero.expand(p.shape) for p in body.parameters()}
        self._stage = _heedless(_real(model, body, params, device, skip=blocks))
        name_of_blocks = next(name for name, module in body.named_modules() if module is blocks)
        staged = self._stage.get_submodule(name_of_blocks)
        assert isinstance(staged, nn.ModuleList)
        for block in staged:
            block.forward = self._record
        for name, module in self._stage.named_modules():
            if name and name != name_of_blocks and not name.startswith(f"{name_of_blocks}."):
                module.register_forward_pre_hook(partial(self._note, name))

    def __call__(self, shape: tuple[int, int], **inputs: Any) -> tuple[Call, ...]:
        """What each block is called with for a micro-batch of ``shape`` (batch, sequence), whose tokens do
        not matter, and ``inputs`` of the body beside them.
        """
        self.after, self._calls, self._first = [], [], None
        gpus = [self._device] if self._device.type == "cuda" else []
        tokens = torch.zeros(shape, dtype=torch.int64, device=self._device)
        with torch.no_grad(), torch.random.fork_rng(gpus), WholeSums():  # the embedding's dropout draws
            self._stage(input_ids=tokens, use_cache=False, **inputs)
        calls, self._calls, self._first = tuple(self._calls), [], None
        assert len(calls) == self._count, f"{len(calls)} of {self._count} blocks were called"
        return calls

    # Families whose blocks return a tuple take item 0 of this tensor: of the first one, however many blocks
    # there are, so that it keeps its width. Nothing recorded depends on it.
    def _record(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._first = x if self._first is None else self._first
        self._calls.append((args, kwargs))
        return self._first

    def _note(self, name: str, *_: Any) -> None:
        if len(self._calls) == self._count and not any(name.startswith(f"{outer}.") for outer in self.after):
            self.after.append(name)


class _Tail(nn.Module):
    """What stands in for the body in the head: the modules after the last block, on ``inputs_embeds``. Its
    output has ``router_logits``, which heads of mixtures of experts ask for and do nothing with.
    """

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.modules_after = nn.ModuleList(modules)

    def forward(
        self, *_: Any, inputs_embeds: Tensor, **_kwargs: Any
    ) -> MoEModelOutputWithPastAndCrossAttentions:
        for module in self.modules_after:
            inputs_embeds = module(inputs_embeds)
        return MoEModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)


class _NoAngles(nn.Module):
    """What stands in for rotary angles where nobody reads them."""

    def forward(self, *_: Any, **_kwargs: Any) -> tuple[None, None]:
        return None, None


def _find_blocks(model: PreTrainedModel, count: int) -> tuple[nn.Module, nn.ModuleList]:
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) == count and not inside:
            found.append((name, module))
    if len(found) != 1:
        raise UserError(
            f"{type(model).__name__} has {len(found)} lists of {count} blocks, so it cannot be cut into "
            "layers",
            "use a language model with one stack of blocks",
        )
    name, blocks = found[0]
    return _body_of(model, name), blocks


def _body_of(model: PreTrainedModel, name_of_blocks: str) -> nn.Module:
    """The innermost module around the blocks that takes token numbers."""
    name = name_of_blocks
    while name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        if module is not model and "input_ids" in inspect.signature(module.forward).parameters:
            return module
    raise UserError(
        f"{type(model).__name__} has no part with {name_of_blocks} that takes tokens, so it cannot be cut",
        "choose another model family",
    )


def _real(
    model: PreTrainedModel,
    module: Module,
    replaced: Mapping[int, Any],
    device: torch.device,
    skip: nn.Module | None = None,
) -> Module:
    """A copy of ``module`` that computes on ``device``; ``replaced``: id of a part -> what takes
    its place.
    """
    memo: dict[int, Any] = {id(model.config): model.config, **replaced}
    for part in _parts(module, {*memo, id(skip)}):
        memo |= _buffers(model, part, replaced, device)
    return copy.deepcopy(module, memo)


def _heedless(body: Module) -> Module:
    """``body``, without transformers' look at its tokens, whether to warn of padding: a GPU would be waited
    for.
    """
    vars(body)["warn_if_padding_and_no_attention_mask"] = lambda *_: None
    return body


def _parts(module: nn.Module, without: set[int]) -> Iterator[nn.Module]:
    if id(module) not in without:
        yield module
        for child in module.children():
            yield from _parts(child, without)


def _buffers(
    model: PreTrainedModel, module: nn.Module, known: Mapping[int, Any], device: torch.device
) -> dict[int, Tensor]:
    """Real values of the module's own buffers, such as rotary frequencies, by the id of the meta buffer; but
    of those in ``known``.
    """
    buffers = module.named_buffers(recurse=False)
    own = {name: buffer for name, buffer in buffers if buffer.is_meta and id(buffer) not in known}
    if not own:
        return {}
    tries = []
    for fill in (0, 1):
        tries.append({id(b): torch.full_like(b, fill, device="cpu") for b in own.values()})
        memo: dict[int, Any] = {id(model.config): model.config, **tries[-1]}
        model._init_weights(copy.deepcopy(module, memo))  # type: ignore[no-untyped-call]  # noqa: SLF001
    for name, buffer in own.items():
        if not torch.equal(tries[0][id(buffer)], tries[1][id(buffer)]):
            raise UserError(
                f"{type(module).__name__}.{name} has no initial value in transformers",
                "choose another model family",
            )
    return {key: value.to(device) for key, value in tries[0].items()}


def mapped(value: Any, of: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every tensor in it, wherever it stands, replaced by what ``of`` makes of it."""
    match value:
        case Tensor():
            return of(value)
        case tuple():
            return tuple(mapped(each, of) for each in value)
        case dict():
            return {key: mapped(each, of) for key, each in value.items()}
        case _:
            return value


def _on_meta(value: Any) -> Any:
    """``value`` with tensors that have no numbers."""
    return mapped(value, lambda tensor: tensor.to("meta"))
