"""Keys that others' configurations have: each is answered by what there is instead, and by a page."""

from __future__ import annotations

import re

import pytest

from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.wishes import WISHES, wish_of
from tests.unit.test_imports import ROOT

TRAIN = {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 16}


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("", "packing"), ("", "chat_template"), ("", "sft"), ("", "validation"), ("", "wandb"), ("", "lora"),
        ("", "tokenizer"), ("", "parallelism"), ("", "logging"), ("train", "tokenizer"),
        ("data", "split"), ("data", "loss_mask"), ("data", "num_workers"), ("train", "torch_compile"),
        ("train", "gradient_checkpointing"), ("train", "recompute"), ("train", "offload"),
        ("train", "eval_every"),
        ("train", "gradient-accumulation-steps"), ("train", "epochs"), ("train", "batch_size"),
        ("train", "learning_rate"), ("train", "fsdp"), ("train", "tensor_parallel"), ("model", "moe"),
        ("model", "quantization"), ("model", "hidden_size"), ("optimizer", "scheduler"),
        ("optimizer", "type"), ("optimizer", "learning_rate"),
        ("optimizer", "freeze"), ("checkpoint", "save_steps"),
        ("resources", "gpus"),
    ],
)  # fmt: skip
def test_a_wish_names_the_page(table: str, key: str) -> None:
    raw = {"name": "j", "train": TRAIN}
    wished = (
        {**raw, key: {}} if not table else {**raw, table: {**(TRAIN if table == "train" else {}), key: 1}}
    )
    with pytest.raises(JobError) as caught:
        parse_job(wished)
    assert caught.value.path == (f"{table}.{key}" if table else key)
    assert caught.value.hint.startswith("see docs/")


def test_pages_exist() -> None:
    for page in {wish.page for wish in WISHES.values()}:
        path, _, anchor = page.partition("#")
        titles = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in titles}
        assert not anchor or anchor in anchors, page


def test_no_key_of_a_job_is_a_wish_in_its_own_table() -> None:
    for field in Job.__struct_fields__:
        assert wish_of(field) is None or field == "optimizer"


def test_a_slip_of_the_pen_is_still_one() -> None:
    with pytest.raises(JobError) as caught:
        parse_job({"name": "j", "train": {**TRAIN, "precison": "fp32"}})
    assert "did you mean 'precision'?" in caught.value.hint
