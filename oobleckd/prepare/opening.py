"""Opens a tokenizer.json, as preparing data needs it.

Knows no job: a process that tokenizes loads this, and would spend as long on a job's model as on half a
megabyte of text. ``tokenizers`` itself is loaded when a tokenizer is opened.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from oobleckd.tokens.errors import DataError

HINT = "name a folder with tokenizer.json, or such a file"


def opened(file: Path) -> Any:
    """The tokenizer of ``file``, which cuts nothing off and fills nothing up. Raises DataError."""
    # A process tokenizes on one core: there are as many processes as there are to be.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no other kind
        raise DataError(f"data.tokenizer: {file} cannot be read: {error}", HINT) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def see_all_characters(tokenizer: Any) -> None:
    """Make it say of each token where all its characters were."""
    # Llama 3's, and others, leave blanks out of what a token covers, so the indents of an answer's code would
    # be part of nothing. What else a post-processor does, adding tokens, nobody asks for. (D-data-024)
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
