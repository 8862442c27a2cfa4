"""Trains a tokenizer on the text files of a folder: a byte-level BPE, so that any text has tokens.

``python examples/train_tokenizer.py corpus tokenizer --size 8192`` writes the folder ``tokenizer``, which
``data.tokenizer`` of a job and transformers' ``AutoTokenizer.from_pretrained`` take. docs/pretrain.md has
what comes before and after.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
PART_CHARS = 1 << 20


def parts_of(corpus: Path) -> Iterator[str]:
    """The text of all its files, so much at a time."""
    for file in sorted(corpus.rglob("*.txt")):
        with file.open(encoding="utf-8") as text:
            while part := text.read(PART_CHARS):
                yield part


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description="Train a tokenizer on the .txt files of a folder.")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=8192, help="so many tokens at most (8192)")
    asked = parser.parse_args()
    if next(parts_of(asked.corpus), None) is None:
        parser.error(f"{asked.corpus} has no .txt file with text in it")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=asked.size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(parts_of(asked.corpus), trainer)
    asked.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(asked.out / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (asked.out / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    print(f"{asked.out}: {tokenizer.get_vocab_size():,} tokens")


if __name__ == "__main__":
    main()
