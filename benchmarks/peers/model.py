"""The model, its stages, its samples and its optimizer, as plain torch and transformers: for the
peers only.
"""

from __future__ import annotations

from pydoc_data import topics

import torch
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.peers import shape


def gpt2() -> GPT2LMHeadModel:
    """The whole model, the same weights in every process. One thread per process, as everywhere here."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config.from_dict({**shape.gpt2_config(), "use_cache": False}))


def adamw(module: torch.nn.Module) -> torch.optim.AdamW:
    """As a user would write it; torch chooses the implementation."""
    return torch.optim.AdamW(module.parameters(), lr=shape.LEARNING_RATE)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token: logits (batch, sequence, vocabulary), tokens (batch,
    sequence).
    """
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def run(schedule: Schedule1F1B, tokens: torch.Tensor, *, first: bool, last: bool) -> None:
    """One step of a pipeline's schedule on the stage of this process: tokens of shape (samples, sequence)."""
    inputs = (tokens,) if first else ()
    if last:
        schedule.step(*inputs, target=tokens, losses=[])
    else:
        schedule.step(*inputs)


class Text:
    """Python's own help topics as bytes: text that is on every machine."""

    def __init__(self) -> None:
        text = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._windows = self._tokens.numel() // shape.SEQUENCE

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Samples ``first`` .. ``first + count - 1``: int64 of shape (count, sequence)."""
        starts = [(sample * 7919 % self._windows) * shape.SEQUENCE for sample in range(first, first + count)]
        return torch.stack([self._tokens[start : start + shape.SEQUENCE] for start in starts])


class Stage(torch.nn.Module):
    """Stage ``index`` of ``count`` equal ones: tokens or hidden states in, hidden states or logits out."""

    def __init__(self, model: GPT2LMHeadModel, index: int, count: int) -> None:
        super().__init__()
        whole, each = model.transformer, shape.NUM_LAYERS // count
        first, last = index == 0, index == count - 1
        self.tokens = whole.wte if first else None
        self.positions = whole.wpe if first else None
        self.blocks = torch.nn.ModuleList(whole.h[index * each : (index + 1) * each])
        self.norm = whole.ln_f if last else None
        self.head = model.lm_head if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            out = block(x)
            x = out[0] if isinstance(out, tuple) else out
        return x if self.norm is None or self.head is None else self.head(self.norm(x))
