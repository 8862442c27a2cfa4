"""docs/pretrain.md, small: a tokenizer of a folder's text, its tokens, a Llama trained on them by a cluster,
and the folder that transformers loads.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oobleckd.host.jobfile import load_job
from oobleckd.worker.models import load_config
from tests.helpers.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "llama-10m.toml"
SMALLER = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "steps": 80, "global_batch": 8, "sequence": 32,
    "max_position_embeddings": 64, "warmup_steps": 2, "lr": 5e-3, "f": 0, "held_out": 0.3,
}  # fmt: skip


def test_the_example_has_ten_million_weights() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(load_job(EXAMPLE)))
    assert 9.5e6 < model.num_parameters() < 10.5e6


def test_the_page_from_text_to_a_model(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "more").mkdir(parents=True)
    for number in range(30):
        folder = corpus / "more" if number % 2 else corpus
        (folder / f"{number}.txt").write_text(f"Once upon a time there were {number} kings. " * 20)
    script = [
        sys.executable,
        ROOT / "examples" / "train_tokenizer.py",
        "corpus",
        "tokenizer",
        "--size",
        "300",
    ]
    subprocess.run(script, cwd=tmp_path, check=True, capture_output=True)
    text = EXAMPLE.read_text()
    for key, value in SMALLER.items():
        text, found = re.subn(rf"^{key} = [^ \n]+", f"{key} = {value}", text, flags=re.MULTILINE)
        assert found == 1, key
    (tmp_path / "job.toml").write_text(text)
    with Cluster(tmp_path / "state", 1) as cluster:

        def ctl(*words: str) -> str:
            command = [sys.executable, "-P", "-m", "oobleckd.ctl.main", *words]
            done = subprocess.run(
                command, cwd=tmp_path, env=cluster.env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, (words, done.stdout, done.stderr)
            return done.stdout

        folder = Path(ctl("data", "prepare", "job.toml").strip())
        assert folder.parent == corpus / "prepared"
        told = json.loads(ctl("data", "stats", "job.toml", "-o", "json"))
        assert told["documents"] == 30
        assert "Once upon a time" in ctl("data", "show", "job.toml", "--step", "1", "--micro-batch", "0")
        ctl("submit", "job.toml", "--wait")
        losses = [step["loss"] for step in json.loads(ctl("get", "steps", "-o", "json"))["items"]]
        assert min(losses) < math.log(300) / 4
        (evaluation,) = json.loads(ctl("get", "evaluations", "-o", "json"))["items"]
        assert evaluation["step"] == 80
        assert evaluation["loss"] < math.log(300) / 4, "the documents held out are like the others"
        ctl("export", "llama-10m", "model")
    for file in (tmp_path / "tokenizer").iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    asked = tokenizer("Once upon a", return_tensors="pt")
    answered = tokenizer.decode(model.generate(**asked, max_new_tokens=4, do_sample=False)[0])
    assert answered.startswith("Once upon a time")
