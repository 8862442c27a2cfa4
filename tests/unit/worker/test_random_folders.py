"""Random folders: a job begins with what ``from_pretrained`` gives, bit for bit, or the folder is refused in
a sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from oobleckd.worker.models import MASKED, ModelSpec, load_spec
from oobleckd.worker.runtime.errors import UserError
from tests.helpers.folders import Folder, make
from tests.helpers.models import all_layers, all_params, layered_step, seed_like_layers, small_job, some_batch

FOLDERS = 200
AGAIN = "test_a_folder_gives_the_bits_of_transformers_or_is_refused"


def loaded(folder: Folder) -> tuple[PreTrainedModel, dict[str, Any]]:
    """As transformers loads it, and what it says of that."""
    transformers.utils.logging.disable_progress_bar()
    auto = AutoModelForMaskedLM if folder.family in MASKED else AutoModelForCausalLM
    model, said = auto.from_pretrained(folder.path, dtype=torch.float32, output_loading_info=True)
    return model, said


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.detach().view(torch.int32), other.detach().view(torch.int32)
    )


def begun(folder: Folder) -> tuple[ModelSpec | None, str]:
    """The model as a job begins with it, or why it does not."""
    try:
        return load_spec(small_job(folder.family, {}, model={"checkpoint": str(folder.path)})), ""
    except UserError as error:
        return None, f"{error}; {error.hint}"


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(FOLDERS))
def test_a_folder_gives_the_bits_of_transformers_or_is_refused(seed: int, tmp_path: Path) -> None:
    folder = make(seed, tmp_path / "m")
    again = (
        f"{folder.family}: {'; '.join(folder.what)}\nagain: pytest "
        f"'tests/unit/worker/test_random_folders.py::{AGAIN}[{seed}]'"
    )
    spec, refusal = begun(folder)
    if spec is None:
        assert folder.refused is not False, f"{refusal}\n{again}"
        assert "\n" not in refusal
        return
    params = all_params(spec)
    assert not folder.refused, f"is not refused\n{again}"
    model, said = loaded(folder)
    assert spec._folder is not None
    assert spec._folder.missing == said["missing_keys"], again
    assert spec._folder.unexpected == said["unexpected_keys"], again
    names = {id(param): name for name, param in model.named_parameters(remove_duplicate=False)}
    assert len(names) == len(params), again
    for key, value in params.items():
        theirs = model.get_parameter(key)
        if key in said["missing_keys"]:
            with torch.no_grad():
                theirs.copy_(value)  # made fresh by either, each in its own way
        assert same(value, theirs), f"{key}\n{again}"
    batch = some_batch(spec)
    loss, _ = layered_step(spec, all_layers(spec, params), batch)
    seed_like_layers(model, spec)  # Phi-MoE draws its experts
    # A cache hands on keys in another layout, for which a CPU may sum in another order.
    assert same(loss, model.train()(input_ids=batch.inputs, labels=batch.labels, use_cache=False).loss), again
