"""What computes attention: heard from the blocks, chosen by torch, and said."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from oobleckd.protocol.modelnotes import AttentionNote, attention_words
from oobleckd.worker.canary.attention import (
    AttentionCall,
    Listener,
    attention_of,
    chosen,
    chosen_by_cuda,
    note_for_cuda,
    note_on,
)
from oobleckd.worker.canary.canary import Canary
from oobleckd.worker.models import load_spec
from tests.helpers.models import CPU, small_job
from tests.helpers.separate import separate_spec

BF16 = {"precision": "bf16"}
SHAPE = (1, 4, 8, 16)


def on_cpu(family: str, config: dict[str, Any] | None = None, **train: Any) -> tuple[AttentionNote, ...]:
    found = attention_of(load_spec(small_job(family, config, train=train)))
    return tuple(note_on(call, blocks, CPU) for call, blocks in found)


def on_cuda(family: str, **train: Any) -> tuple[AttentionNote, ...]:
    found = attention_of(load_spec(small_job(family, train=train)))
    return tuple(note_for_cuda(call, blocks) for call, blocks in found)


@pytest.mark.parametrize(
    ("family", "cpu", "fp32", "bf16"),
    [
        ("gpt2", "flash", "memory-efficient", "flash"),
        ("llama", "flash", "math", "flash"),  # query heads share keys, which the second does not know
        ("bert", "flash", "memory-efficient", "flash"),
        ("falcon", "math", "math", "math"),  # a mask of bools, and one head of keys
        ("gemma2", "eager", "eager", "eager"),
        ("bloom", "eager", "eager", "eager"),
        ("modernbert", "flash", "memory-efficient", "flash"),
    ],
)
def test_each_family_says_itself_what_it_asks_for(family: str, cpu: str, fp32: str, bf16: str) -> None:
    assert {note.backend for note in on_cpu(family)} == {cpu}
    assert {note.backend for note in on_cuda(family)} == {fp32}
    assert {note.backend for note in on_cuda(family, **BF16)} == {bf16}
    assert sum(note.blocks for note in on_cpu(family)) == 2


def test_dropout_shows() -> None:
    config = {"n_layer": 3, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    assert on_cpu("gpt2", {**config, "attn_pdrop": 0.1}) == (AttentionNote(3, "math", "dropout"),)


def test_documents_that_are_kept_apart_are_a_mask() -> None:
    ((call, blocks),) = attention_of(separate_spec("gpt2", "bf16"))
    assert call is not None
    assert (blocks, call.mask, call.of_bools) == (3, (1, 1, 12, 12), False)
    assert chosen_by_cuda(call) == ("memory-efficient", "a mask")


@pytest.mark.parametrize(
    ("changes", "backend", "why"),
    [
        ({}, "flash", ""),
        ({"dtype": torch.float32}, "memory-efficient", "float32"),
        ({"mask": (1, 1, 8, 8)}, "memory-efficient", "a mask"),
        ({"query": (1, 4, 8, 288)}, "memory-efficient", "heads of 288"),
        ({"query": (1, 4, 8, 20)}, "flash", ""),
        ({"query": (1, 4, 8, 20), "mask": (8, 8)}, "math", "a mask, and heads of 20, no multiple of 8"),
        ({"key": (1, 2, 8, 16), "grouped": True}, "flash", ""),
        (
            {"key": (1, 2, 8, 16), "grouped": True, "dtype": torch.float32},
            "math",
            "float32, and 4 query heads share 2 of keys",
        ),
    ],
    ids=str,
)
def test_the_rule_of_cuda(changes: dict[str, Any], backend: str, why: str) -> None:
    shapes: dict[str, Any] = {"query": changes.get("query", SHAPE)}
    shapes["key"] = shapes["value"] = changes.get("key", shapes["query"])
    call = AttentionCall(**{"dtype": torch.bfloat16, "causal": True, **shapes, **changes})
    assert chosen_by_cuda(call) == (backend, why)


def test_a_flag_of_torch_is_heeded() -> None:
    call = AttentionCall(SHAPE, SHAPE, SHAPE, causal=True)
    assert chosen(call, CPU) == "flash"
    torch.backends.cuda.enable_flash_sdp(enabled=False)
    try:
        assert chosen(call, CPU) == "math"
    finally:
        torch.backends.cuda.enable_flash_sdp(enabled=True)


def test_who_listens_changes_nothing() -> None:
    query = torch.rand(SHAPE)
    attention = torch.nn.functional.scaled_dot_product_attention
    with Listener(torch.float32) as listener:
        heard = attention(query, query, query, is_causal=True)
    assert torch.equal(heard, attention(query, query, query, is_causal=True))
    assert listener.heard == AttentionCall(SHAPE, SHAPE, SHAPE, causal=True)


def test_a_device_says_it_in_its_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oobleckd.worker.canary.canary")
    Canary("n/0", CPU, {}).sing(load_spec(small_job("llama")), {})
    assert caplog.messages[-1] == "n/0: attention, at 2 x 8 tokens: flash in 2 blocks"


def test_words() -> None:
    notes = (AttentionNote(3, "flash"), AttentionNote(1, "math", "dropout"))
    assert attention_words(notes) == "flash in 3 blocks; math in 1 block (dropout)"
