"""Chats, and tokenizers with a chat template."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from oobleckd.tokens.asked import AskedTokens
from oobleckd.tokens.index import read_index
from oobleckd.tokens.manifest import INDEX, LOSS, TOKENS
from tests.helpers.corpora import make_tokenizer

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<bos>", "</s>",
    "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
WORDS = {"bos_token": "<bos>", "eos_token": "</s>"}


def chat(*said: str, first: str = "user", **more: Any) -> list[dict[str, Any]]:
    """Messages of user and assistant by turns; ``first``: whose the first one is. ``more``: of the last."""
    roles = ["user", "assistant"]
    if first == "system":
        roles = ["system", *roles * len(said)]
    elif first == "assistant":
        roles = roles[::-1]
    roles = (roles * len(said))[: len(said)]
    messages: list[dict[str, Any]] = [
        {"role": role, "content": text} for role, text in zip(roles, said, strict=True)
    ]
    messages[-1] |= more
    return messages


CHATS = tuple(
    chat(f"What is {number}?", f"It is\n    the   number {number}.", "Sure?", f"Yes, {number} ünïcödé.")
    if number % 3
    else chat("Be kind.", f"Is {number} even?", "No." if number % 2 else "Yes.", first="system")
    for number in range(20)
)


def chatml_text(messages: list[dict[str, Any]]) -> str:
    """What ``chat_templates.CHATML`` makes of them."""
    own = [] if messages[0]["role"] == "system" else chat("You are a helpful assistant.", first="system")
    return "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in (*own, *messages))


def chat_tokenizer(folder: Path, template: str = "", **config: Any) -> Path:
    """``folder`` with a tokenizer that knows ``SPECIAL``, and a ``template``."""
    texts = tuple(str(message["content"]) for messages in CHATS for message in messages)
    file = make_tokenizer(folder, texts) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(file))
    told = {**WORDS, **({"chat_template": template} if template else {}), **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
    return folder


def write_lines(file: Path, *rows: Any) -> Path:
    """A JSON document a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def asked_of(folder: Path, tokenizer: Path) -> list[tuple[str, str]]:
    """Of each document of a prepared folder its text, and what of it the loss asks for."""
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    index = read_index(folder / INDEX)
    tokens = np.fromfile(folder / TOKENS, index.dtype)
    asked = AskedTokens(np.fromfile(folder / LOSS, np.uint8))
    found = []
    for start, stop in pairwise(index.document_starts().tolist()):
        some = tokens[start:stop], tokens[start:stop][asked.mask(start, stop)]
        texts = [loaded.decode(each.tolist(), skip_special_tokens=False) for each in some]
        found.append((texts[0], texts[1]))
    return found
