"""Mixtures of experts for tests: folders as the hub has them, and routers that see no difference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from oobleckd.worker.models import ModelSpec, load_config
from tests.helpers.models import small_job

ROUTER = re.compile(r"\.(gate|router)\.")
"""Names of parameters of routers have it."""


def saved(family: str, folder: Path, **config: object) -> PreTrainedModel:
    """A model as ``save_pretrained`` leaves it, with other values of all that is in it than a fresh one;
    ``config``: all of it, if not a small one.
    """
    made = load_config(small_job(family, config or None))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.1)
    model.save_pretrained(folder)
    return model


def tie_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on all experts of a fresh model are equally good for every token."""
    init = ModelSpec.init

    def tied(spec: ModelSpec, bucket: int, device: torch.device) -> list[Tensor]:
        keyed = zip(spec.buckets[bucket].keys, init(spec, bucket, device), strict=True)
        return [value[:1].expand_as(value).clone() if ROUTER.search(key) else value for key, value in keyed]

    monkeypatch.setattr(ModelSpec, "init", tied)
