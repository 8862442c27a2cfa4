"""Nothing that a family computes is refused by torch's strict mode on CUDA
(``oobleckd.worker.device.context``), as far as a CPU can tell.

The list is of what torch says in ``use_deterministic_algorithms``, by the names of its operators.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from oobleckd.worker.models import FAMILIES, load_spec
from oobleckd.worker.models.config import EXPERTS, TIED
from oobleckd.worker.models.strict import WholeSums
from tests.helpers.models import (
    CPU,
    DROPOUTS,
    all_layers,
    all_params,
    layered_step,
    small_config,
    small_job,
    some_batch,
)

REFUSED = re.compile(
    r"put_?|histc|kthvalue|(nan)?median|index_reduce_?|nll_loss2d_\w+|\w*ctc_loss_backward|_embedding_bag_\w*backward"
    r"|(adaptive_|fractional_)?(avg|max)_pool\dd\w*_backward|fractional_max_pool\dd|max_unpool\dd|upsample_(?!nearest)\w+_backward"
    r"|reflection_pad\dd_backward|grid_sampler_\dd_backward"
)


def is_refused(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator throws there."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    match name:
        case "cumsum" | "cumsum_":
            return tensors[0].is_floating_point() or tensors[0].is_complex()
        case "bincount":
            return len(tensors) > 1 or kwargs.get("weights") is not None
        case "scatter_reduce" | "scatter_reduce_":
            return "prod" in args
        case _:
            return REFUSED.fullmatch(name) is not None


class Watch(TorchDispatchMode):
    """Notes every operator that is carried out, and those that are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.refused: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        self.seen.add(name)
        if is_refused(name, args, kwargs or {}):
            self.refused.add(name)
        return func(*args, **(kwargs or {}))


class WholeCounts(TorchFunctionMode):
    """Tokens of each expert are counted in integers on a GPU, where that is not refused, and in floats on a
    CPU alone: what comes after sees integers here too.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.int() if func is torch.histc else out


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_every_family_runs_in_strict_mode(family: str) -> None:
    config = small_config(family, tie_word_embeddings=family in TIED, **dict.fromkeys(DROPOUTS, 0.1))
    with Watch() as watch, WholeCounts():
        spec = load_spec(small_job(family, config))
        layered_step(spec, all_layers(spec, all_params(spec)), some_batch(spec))
    assert watch.refused == ({"histc"} if family in EXPERTS else set())
    assert "embedding" in watch.seen
    assert any("backward" in name for name in watch.seen), "nothing of the backward was seen"


def test_opt_itself_would_be_refused() -> None:
    """Or ``WholeSums`` can go."""
    spec = load_spec(small_job("opt"))
    model = AutoModelForCausalLM.from_config(spec.config, dtype=torch.float32)
    with Watch() as watch:
        model(input_ids=some_batch(spec).inputs)
    assert watch.refused == {"cumsum"}


@pytest.mark.parametrize(
    "name",
    ["put_", "histc", "kthvalue", "median", "grid_sampler_2d_backward",
     "upsample_linear1d_backward", "nll_loss2d_forward"]
)  # fmt: skip
def test_the_list_knows_what_torch_refuses(name: str) -> None:
    assert is_refused(name, (), {})


def test_whole_sums_have_the_bits_of_float_ones() -> None:
    mask = torch.ones((2, 5000), device=CPU)
    with WholeSums():
        for found in (
            torch.cumsum(mask, dim=1),
            mask.cumsum(-1),
            torch.cumsum(mask, dim=1, dtype=torch.float32),
        ):
            assert found.dtype == torch.float32
            assert torch.equal(found, torch.arange(1, 5001, dtype=torch.float32).expand(2, -1))
        weighed = torch.full((3,), 0.5, requires_grad=True)
        assert torch.cumsum(weighed, 0).tolist() == [0.5, 1.0, 1.5]
        assert torch.cumsum(torch.ones(3, dtype=torch.int64), 0).dtype == torch.int64
