"""Random folders of small models, as people have them: every family, layout, naming, dtype and mistake; by
seed.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from oobleckd.worker.models import FAMILIES, MASKED
from oobleckd.worker.models.config import TIED
from tests.helpers.models import small_config

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
METHODS = (
    "fp8",
    "gptq",
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "mxfp4",
    "quanto",
    "torchao",
    "hqq",
    "unheard-of",
)


@dataclass(slots=True)
class Folder:
    """A folder that was made: ``refused`` says whether it has to be (None: it may be), and ``what`` how it
    came about.
    """

    path: Path
    family: str
    what: list[str] = field(default_factory=list)
    refused: bool | None = False


def make(seed: int, path: Path) -> Folder:
    """The folder number ``seed``, in the new folder ``path``."""
    draw = random.Random(seed)
    made = Folder(path, FAMILIES[seed % len(FAMILIES)])
    path.mkdir(parents=True)
    tied = made.family in TIED or draw.random() < 0.5
    config = AutoConfig.for_model(made.family, **small_config(made.family, tie_word_embeddings=tied))
    model = _model(made.family, config, seed)
    table = json.loads(config.to_json_string(use_diff=False))
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    _tie(made, draw, model, tensors)
    _lose(made, draw, tensors, table)
    _name(made, draw, model, tensors)
    _add(made, draw, tensors)
    tensors = _cast(made, draw, tensors)
    _quantize(made, draw, tensors, table)
    _age(made, draw, table)
    (path / "config.json").write_text(json.dumps({**table, "model_type": made.family}))
    _write(made, draw, tensors)
    return made


def _model(family: str, config: Any, seed: int) -> PreTrainedModel:
    auto = AutoModelForMaskedLM if family in MASKED else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            saved = {id(value): value for value in model.state_dict(keep_vars=True).values()}
            for value in saved.values():
                value.add_(torch.randn_like(value), alpha=0.1)
    return model


def _tie(made: Folder, draw: random.Random, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """Of a tied tensor one name is stored, or the other, or both, equal or not."""
    pairs = model.all_tied_weights_keys.items()
    how = draw.choices(("source", "other", "both", "differ", "neither"), (4, 3, 2, 2, 1))[0]
    if not pairs:
        return
    made.what.append(f"tied: {how}")
    for name, source in pairs:
        if how in {"source", "neither"}:
            tensors.pop(name, None)
        if how in {"other", "neither"}:
            tensors.pop(source, None)
        if how == "differ":
            tensors[name] = tensors[name] + 1
    if how in {"both", "differ"} and made.family in TIED:  # also where they are stored in two dtypes
        made.refused = None


def _lose(made: Folder, draw: random.Random, tensors: dict[str, Tensor], table: dict[str, Any]) -> None:
    """Some tensors are not there, or the model is of another depth."""
    how = draw.choices(("nothing", "some", "head", "layer", "most"), (6, 2, 1, 2, 1))[0]
    names = sorted(tensors)
    last = [name for name in names if re.search(r"\.1\.", name)]
    gone: list[str] = []
    if how == "some":
        gone = draw.sample(names, 2)
    elif how == "head":
        gone = [name for name in names if "head" in name or "cls." in name]
    elif how == "layer" and draw.random() < 0.5:
        depth = CONFIG_MAPPING[made.family].attribute_map.get("num_hidden_layers", "num_hidden_layers")
        table[depth] -= 1
        for key in ("layer_types", "no_rope_layers"):
            if isinstance(table.get(key), list):
                table[key] = table[key][:-1]
    elif how == "layer":
        gone = last
    elif how == "most":
        gone = [name for name in names if name not in last[:1]]
        made.refused = True
    for name in gone:
        del tensors[name]
    made.what.append(f"lost: {how}")


def _name(made: Folder, draw: random.Random, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """Names as the model has them, as it is saved, without the prefix or with another one, or older ones."""
    how = draw.choice(("model", "saved", "base", "legacy", "twice"))
    prefix = f"{model.base_model_prefix}."
    named = dict(tensors)
    if how == "saved":
        named = revert_weight_conversion(model, named)
    elif how == "base":
        named = {name.removeprefix(prefix): value for name, value in named.items()}
    elif how == "legacy":
        named = {_older(name): value for name, value in named.items()}
    elif how == "twice":
        name = draw.choice(sorted(named))
        named[_older(name) if _older(name) != name else name.removeprefix(prefix)] = named[name] + 1
    tensors.clear()
    tensors.update(named)
    made.what.append(f"names: {how}")


def _older(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def _add(made: Folder, draw: random.Random, tensors: dict[str, Tensor]) -> None:
    """Tensors that nothing uses, some of which transformers does not mention."""
    first = min((name for name in tensors if name.endswith("weight")), default="x.weight")
    for name, value in {
        first.replace("weight", "extra_bias"): torch.ones(3),
        "score.weight": torch.ones(2, 32),
        "rotary_emb.inv_freq": torch.ones(4),
        "h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        "layers.0.attention.masked_bias": torch.tensor(-1e9),
        "embeddings.position_ids": torch.arange(16)[None],
        "cls.seq_relationship.weight": torch.ones(2, 32, dtype=torch.bfloat16),
    }.items():
        if draw.random() < 0.15:
            tensors[name] = value
            made.what.append(f"more: {name}")
    if draw.random() < 0.05 and first in tensors:
        tensors[first].flatten()[0] = draw.choice((float("nan"), float("inf")))
        made.what.append(f"not finite: {first}")


def _cast(made: Folder, draw: random.Random, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    kind = draw.choice((*DTYPES, None))
    made.what.append(f"dtype: {kind or 'mixed'}")
    return {
        name: value.to(kind or draw.choice(DTYPES)) if value.is_floating_point() else value
        for name, value in tensors.items()
    }


def _quantize(made: Folder, draw: random.Random, tensors: dict[str, Tensor], table: dict[str, Any]) -> None:
    if draw.random() > 0.15 or not tensors:
        return
    how = draw.choice(("config", "float8", "int8", "bool", "companion", "packed"))
    name = draw.choice([key for key, value in sorted(tensors.items()) if value.is_floating_point()])
    weight = tensors[name].nan_to_num()
    if how == "config":
        table["quantization_config"] = {"quant_method": draw.choice(METHODS)}
    elif how == "float8":
        tensors[name] = weight.to(torch.float8_e4m3fn)
    elif how == "companion":
        suffixes = (
            "_scale_inv",
            "_scale",
            ".absmax",
            "_zero_point",
            ":scale",
            ".quant_state.bitsandbytes__nf4",
        )
        tensors[f"{name}{draw.choice(suffixes)}"] = torch.ones(1)
    elif how == "packed":
        module = name.rpartition(".")[0]
        tensors |= {
            f"{module}.qweight": torch.ones(2, 2, dtype=torch.int32),
            f"{module}.scales": torch.ones(2),
        }
    else:
        tensors[name] = weight.to(getattr(torch, how))
    if how != "bool" or f"more: {name}" not in made.what:
        made.refused = True
    made.what.append(f"quantized: {how} {name}")


def _age(made: Folder, draw: random.Random, table: dict[str, Any]) -> None:
    """Fields that other versions and other people write."""
    old = table.get("rope_parameters")
    if isinstance(old, dict) and "rope_theta" in old and draw.random() < 0.4 and made.family != "gpt_neox":
        del table["rope_parameters"]
        table |= {"rope_theta": draw.choice((1e4, 5e5)), "rope_scaling": None}
        if "partial_rotary_factor" in old:
            table["partial_rotary_factor"] = old["partial_rotary_factor"]
        made.what.append("config: rope_theta")
    if draw.random() < 0.3:
        table |= {
            "torch_dtype": "bfloat16",
            "_name_or_path": "/somewhere",
            "my_own": {"a": [1]},
            "gradient_checkpointing": False,
        }
        table.pop("dtype", None)
        made.what.append("config: more")
    if draw.random() < 0.1:
        table |= {"output_hidden_states": True, "use_cache": True}
        made.what.append("config: outputs")


# ---------------------------------------------------------------------- files


def _write(made: Folder, draw: random.Random, tensors: dict[str, Tensor]) -> None:
    path = made.path
    how = draw.choice(
        (
            "single",
            "single",
            "shards",
            "resaved",
            "cache",
            "below",
            "unindexed",
            "overlap",
            "promised",
            "outside",
        )
    )
    made.what.append(f"files: {how}")
    stranger = {name: torch.ones(3) for name in list(tensors)[:2]}
    match how:
        case "single":
            _save(tensors, path / "model.safetensors")
            (path / "pytorch_model.bin").write_bytes(b"a pickle")
        case "resaved":  # as save_pretrained leaves a folder that had shards
            _save(tensors, path / "model.safetensors")
            _index(path, dict.fromkeys(tensors, "model-00001-of-00002.safetensors"))
        case "cache":
            blobs = path.with_name(f"{path.name}-blobs")
            blobs.mkdir()
            _save(tensors, blobs / "4f2a")
            (path / "model.safetensors").symlink_to(blobs / "4f2a")
        case _:
            _write_shards(made, draw, tensors, stranger, how)


def _write_shards(
    made: Folder, draw: random.Random, tensors: dict[str, Tensor], stranger: dict[str, Tensor], how: str
) -> None:
    path, files = made.path, [f"model-{i + 1:05d}-of-00003.safetensors" for i in range(3)]
    if how == "below":
        files = [f"weights/{name}" for name in files]
    places = {name: draw.choice(files) for name in sorted(tensors)}
    shards = {file: {name: tensors[name] for name in tensors if places[name] == file} for file in files}
    if how == "overlap" and tensors:  # another value in an earlier shard, which does not count
        name = min(tensors)
        places[name], shards[files[2]][name] = files[0], tensors[name]
        shards[files[0]][name] = tensors[name] + 1 if tensors[name].dtype in DTYPES else tensors[name]
        shards[files[1]].pop(name, None)
    for file, held in shards.items():
        _save(held, path / file)
    if how == "unindexed" and tensors:  # shards are read as a whole, whatever the index has of them
        del places[min(places)]
    if how == "promised":
        places["model.layers.9.nowhere.weight"] = files[0]
    if how == "outside":
        _save(stranger, path.with_name(f"{path.name}-other.safetensors"))
        places["x"] = draw.choice((f"../{path.name}-other.safetensors", "/etc/passwd", str(path / files[0])))
        made.refused = True
    _index(path, places | {f"of {file}": file for file in files if file not in places.values()})


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, file, {"format": "pt"})


def _index(path: Path, places: dict[str, str]) -> None:
    table = {"metadata": {"total_size": 0}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(table))
