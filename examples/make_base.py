"""Makes what docs/finetune.md begins with, where no model and no chats are at hand: a folder in the shape of
Qwen2's, with random weights, a tokenizer and a chat template, and a file of chats.

``python examples/make_base.py base chats.jsonl`` writes both. With a folder of your own, say a Qwen2.5 from
the hub, and chats of your own, you need none of this.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

END, TURN_BEGINS, TURN_ENDS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CAPITALS = {
    "Austria": "Vienna", "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo", "France": "Paris",
    "Ghana": "Accra", "Iceland": "Reykjavik", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima",
}  # fmt: skip
FORMS = ("What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}.")


def chats() -> Iterator[list[dict[str, str]]]:
    """Questions after a capital in all forms, some of them one after the other."""
    found = list(CAPITALS.items())
    for number, (country, city) in enumerate(found):
        other, its_city = found[(number + 1) % len(found)]
        for form in FORMS:
            asked = form.format(country)
            yield [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": f"{city}."},
                {"role": "user", "content": f"And of {other}?"},
                {"role": "assistant", "content": f"{its_city}."},
            ]
            yield [{"role": "user", "content": asked}, {"role": "assistant", "content": f"{city}."}]


def write_tokenizer(folder: Path) -> int:
    """A byte-level BPE of the chats, as Qwen2's is one of the web. Returns how many tokens it has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((message["content"] for chat in chats() for message in chat), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (END, TURN_BEGINS, TURN_ENDS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer", "eos_token": TURN_ENDS, "pad_token": END, "bos_token": None,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return int(tokenizer.get_vocab_size())


def write_model(folder: Path, num_tokens: int, hidden: int, layers: int) -> None:
    """Random weights in Qwen2's shape."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=num_tokens,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=num_tokens - 1,
        initializer_range=0.1,  # so narrow a model learns nothing for long with the usual 0.02
    )
    logging.disable_progress_bar()
    Qwen2ForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Write the folder and the file."""
    parser = argparse.ArgumentParser(description="Make a small model and chats to fine-tune it on.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--hidden", type=int, default=128, help="width of the model (128)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model (4)")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    write_model(asked.folder, write_tokenizer(asked.folder), asked.hidden, asked.layers)
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats()]
    asked.chats.write_text("".join(lines), encoding="utf-8")
    print(f"{asked.folder}: a model of random weights; {asked.chats}: {len(lines)} chats")


if __name__ == "__main__":
    main()
