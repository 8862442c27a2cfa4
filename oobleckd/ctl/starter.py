"""The verb ``init``: a job.toml to begin with, with a word about every line.

Owns the text and its sizes: a model that a few CPUs train in minutes, to be made larger. Whether a node
would take it ``submit --dry-run`` says.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from oobleckd.ctl.evalsources import kind_of
from oobleckd.ctl.options import file_option, named_file, wants_json
from oobleckd.ctl.output import USAGE, Failure, emit_json, emit_line, emit_page, fail, note
from oobleckd.host.durable import write_whole
from oobleckd.prepare.objects import is_url
from oobleckd.protocol.job import parse_job
from oobleckd.protocol.jobtable import JobError
from oobleckd.words import count

_SEQUENCE, _MICRO_BATCH, _LAYERS = 256, 2, 8
_BYTES, _SOME_TOKENS = 256, 65_536  # vocabularies: of bytes, and of token numbers that nobody has looked at
_LIKE_LLAMA = ("llama", "mistral", "qwen2")
_MANY = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 176}
_ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 176, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 176}
_MIXTURES: dict[str, dict[str, int]] = {
    "deepseek_v3": {
        **_ROUTED, "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 32,
    },
    "dots1": _ROUTED,
    "glm4_moe": _ROUTED,
    "gpt_oss": {**_LOCAL, "head_dim": 32},
    "granitemoe": _LOCAL,
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "intermediate_size": 176, "head_dim": 32},
    "minimax": {**_LOCAL, "head_dim": 32},
    "mixtral": _LOCAL,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 176},
    "phimoe": _LOCAL,
    "qwen2_moe": {**_MANY, "shared_expert_intermediate_size": 176},
    "qwen3_moe": _MANY,
}  # fmt: skip
"""What says of a family how many experts it has, how many of them a token goes to, and how wide they are."""
_NEEDS_TOKENIZER = ("jsonl", "parquet", "arrow")


class StarterData(NamedTuple):
    """What is trained on: the lines of `[data]`, and so many different tokens."""

    lines: str
    vocabulary: int
    word: str


@click.command()
@click.option("--name", default="", help="Of the job; made of family and data if not given.")
@click.option(
    "--family", default="gpt2", show_default=True, help="Model type of transformers (docs/models.md)."
)
@click.option(
    "--data", "source", default="stdlib", show_default=True, metavar="PATH",
    help="Text: a file, a folder, a pattern; JSONL, Parquet, Arrow or token numbers by the name's ending.",
)  # fmt: skip
@click.option("--tokenizer", default="", metavar="PATH", help="Folder with a tokenizer.json, or such a file.")
@click.option("--nodes", type=click.IntRange(1, 4096), default=4, show_default=True, help="To train on.")
@click.option("--steps", type=click.IntRange(min=1), default=200, show_default=True, help="Optimizer steps.")
@file_option("The file to write, job.toml if not given; -: stdout.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def init(
    name: str,
    family: str,
    source: str,
    tokenizer: str,
    nodes: int,
    steps: int,
    file: Path | None,
    force: bool,
) -> None:
    """Write a job.toml to begin with, with a word about every line. Prints the file's name.

    It is checked as `submit` checks one; what a node says of model and data `submit FILE --dry-run` shows.
    """
    data = _data(source, tokenizer)
    text = _page(name or _name(family, data.word), family, data, nodes, steps)
    try:
        parse_job(tomllib.loads(text))
    except JobError as error:
        fail(f"{_flag_of(error.path)}: {error.problem}", error.hint, USAGE)
    target = named_file(file) or Path("job.toml")
    if str(target) == "-":
        emit_page(text.rstrip("\n"))
        return
    _write(target, text, force=force)
    if wants_json():
        emit_json("Init", {"file": str(target)})
    else:
        emit_line(str(target))
    note(f"look at it, then: oobleckctl submit {target} --dry-run")


def _write(target: Path, text: str, *, force: bool) -> None:
    if not force and target.exists():
        fail(f"{target} is there already", "name another file with --to, or replace it with --force", USAGE)
    try:
        write_whole(target, text.encode())
    except OSError as error:
        raise Failure(f"{target}: {error.strerror}", "name another file with --to") from error


def _flag_of(path: str) -> str:
    flags = {"name": "--name", "model.family": "--family", "train.steps": "--steps", "data.path": "--data"}
    return flags.get(path, path)


def _name(family: str, word: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", f"{family}-{word}".lower()).strip("-._")[:63]


def _toml(value: Any) -> str:
    """Strings and numbers of TOML are JSON's."""
    return msgspec.json.encode(value).decode()


# --------------------------------------------------------------------------- data


def _data(source: str, tokenizer: str) -> StarterData:
    """Raises Failure with exit code 2 for what is not there, or cannot be without a tokenizer."""
    if source == "stdlib":
        if tokenizer:
            fail("--tokenizer: stdlib is trained on as bytes", "name your text with --data", USAGE)
        return StarterData(
            'source = "stdlib" # the text of the Python standard library, byte by byte, to try things out',
            _BYTES,
            "stdlib",
        )
    if not is_url(source) and not _root(source).exists():
        fail(f"--data: {source} does not exist", "relative paths start at the current folder", USAGE)
    kind = kind_of(source)
    if kind in _NEEDS_TOKENIZER and not tokenizer:
        fail(
            f"--data: {kind} is tokenized first, and no --tokenizer is named",
            "name a folder with a tokenizer.json, or such a file (docs/pretrain.md makes one)",
            USAGE,
        )
    about = {
        "text": "every file is a document" if tokenizer else "every file, byte by byte",
        "tokens": "token numbers, of the kind that the file's content says",
    }
    lines = [
        f"source = {_toml(kind)} # {about.get(kind, 'a row is a document')}",
        f"path = {_toml(source)} # from the folder in which oobleckctl is called; every node must see it",
    ]
    if tokenizer:
        lines.append(f"tokenizer = {_toml(tokenizer)}")
    if kind in _NEEDS_TOKENIZER:
        lines.append('column = "text" # that has the text of a row')
    vocabulary = _vocabulary(tokenizer) if tokenizer else _SOME_TOKENS if kind == "tokens" else _BYTES
    return StarterData("\n".join(lines), vocabulary, Path(source).stem.strip("*?") or "data")


def _root(source: str) -> Path:
    """What lies before the first pattern."""
    path = Path(source).expanduser()
    parts = path.parts
    plain = next((i for i, part in enumerate(parts) if any(sign in part for sign in "*?[")), len(parts))
    return Path(*parts[:plain]) if plain else Path()


def _vocabulary(tokenizer: str) -> int:
    """One more than the largest token number. Raises Failure with exit code 2."""
    path = Path(tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_bytes())
        vocabulary = found["model"]["vocab"]
        numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return 1 + int(max([*numbers, *(token["id"] for token in found.get("added_tokens", ()))]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "is no tokenizer.json"
        fail(f"--tokenizer: {file}: {problem}", "name a folder with a tokenizer.json, or such a file", USAGE)


# --------------------------------------------------------------------------- the page


def _page(name: str, family: str, data: StarterData, nodes: int, steps: int) -> str:
    f = 1 if nodes > 1 else 0
    batch = _MICRO_BATCH * 4 * nodes
    ramp = f"{{ start = {_MICRO_BATCH}, increment = {_MICRO_BATCH}, samples = {4 * batch} }}"
    survive = "may die at once without a step lost" if f else "may die: nobody else has a copy"
    return f"""\
#:schema ./job.schema.json
# For editors that know schemas of TOML: oobleckctl explain --schema > job.schema.json
# Every key: oobleckctl explain train, or docs/job-toml.md. What is left out has the default shown there.
name = {_toml(name)}

[model]
family = {_toml(family)}
{_shape(family, data.vocabulary)}
# checkpoint = "folder" # start from a folder of transformers instead of fresh weights (docs/finetune.md)

[data]
{data.lines}

[train]
steps = {steps}
global_batch = {batch} # sequences a step, whatever the number of nodes
# batch_ramp = {ramp} # smaller batches at first (docs/recipe.md)
micro_batch = {_MICRO_BATCH} # sequences at once; divides global_batch; larger: faster, while memory lasts
sequence = {_SEQUENCE} # tokens a sequence
seed = 0 # of weights, samples and dropout
precision = "fp32" # or "bf16"

[optimizer]
name = "adamw" # or adam, sgd, lion, muon, adafactor (docs/optimizers.md)
lr = 6e-4
schedule = "cosine" # or linear, constant, inverse-sqrt, wsd (docs/recipe.md)
warmup_steps = {max(1, steps // 20)}
weight_decay = 0.1
decay = "matrices" # none on norms, biases and embeddings
clip_norm = 1.0

[fault_tolerance]
f = {f} # so many nodes {survive}
policy = "adaptive" # what follows a loss: whatever costs least

[resources]
max_nodes = {nodes} # 0: all; the others stand by for the place of a dead one

[checkpoint]
every = "auto" # as often as pays, or so many steps
keep = 2

# [eval] # the loss on text that is held out (docs/data.md)
# every = {max(1, steps // 4)}
# held_out = 0.01
"""


def _shape(family: str, vocabulary: int) -> str:
    if family == "gpt2":
        return (
            f"config = {{ vocab_size = {vocabulary}, n_positions = {_SEQUENCE}, n_embd = 256, "
            f"n_layer = {_LAYERS}, n_head = 8 }} # of {count(_LAYERS, 'layer')}: "
            "any of GPT2Config"
        )
    if family in _LIKE_LLAMA:
        return (
            f"config = {{ vocab_size = {vocabulary}, max_position_embeddings = {_SEQUENCE}, "
            "hidden_size = 256, "
            f"intermediate_size = 704, num_hidden_layers = {_LAYERS}, num_attention_heads = 8, "
            "num_key_value_heads = 4, bos_token_id = 0, eos_token_id = 0 }"
        )
    if family in _MIXTURES:
        fields = {
            "vocab_size": vocabulary, "max_position_embeddings": _SEQUENCE, "hidden_size": 256,
            "intermediate_size": 704, "num_hidden_layers": _LAYERS, "num_attention_heads": 8,
            "num_key_value_heads": 4, **_MIXTURES[family],
        }  # fmt: skip
        said = ", ".join(f"{key} = {value}" for key, value in fields.items())
        return f"config = {{ {said} }} # each token goes to 2 of 8 experts"
    return "# config = { … } # fields of the family's configuration class; without: its own, large sizes"
