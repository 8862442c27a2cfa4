"""docs/finetune.md, small: chats and a model that are there, a cluster that trains it on them, and the folder
whose model answers as they do.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from oobleckd.ctl.jobfiles import read_job
from oobleckd.ctl.preparedjob import with_prepared
from oobleckd.worker.tools.samples import samples
from tests.helpers.cluster import Cluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALLER = {"steps": 50, "micro_batch": 8, "sequence": 64, "f": 0, "every": 0}


def test_the_page_from_chats_to_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # In a process of its own: whoever has cut models in this one finds less in transformers.
    script = [sys.executable, EXAMPLES / "make_base.py", "base", "chats.jsonl", "--hidden=64", "--layers=2"]
    subprocess.run(script, check=True, capture_output=True)
    text = (EXAMPLES / "finetune.toml").read_text()
    for key, value in SMALLER.items():
        text, found = re.subn(rf"^{key} = [^ \n]+", f"{key} = {value}", text, flags=re.MULTILINE)
        assert found == 1, key
    Path("job.toml").write_text(text)
    with Cluster(tmp_path / "state", 1) as cluster:

        def ctl(*words: str) -> str:
            command = [sys.executable, "-P", "-m", "oobleckd.ctl.main", *words]
            done = subprocess.run(command, env=cluster.env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (words, done.stdout, done.stderr)
            return done.stdout

        ctl("data", "prepare", "job.toml")
        check_asked(Path("job.toml"))
        ctl("submit", "job.toml", "--wait")
        losses = [step["loss"] for step in json.loads(ctl("get", "steps", "-o", "json"))["items"]]
        assert losses[-1] < 0.3, losses
        ctl("export", "finetune", "model")
    tokenizer = AutoTokenizer.from_pretrained("model")
    model = AutoModelForCausalLM.from_pretrained("model")
    rows = [json.loads(line)["messages"] for line in Path("chats.jsonl").read_text().splitlines()]
    right = 0
    for messages in rows[1::6]:
        asked = tokenizer.apply_chat_template(
            messages[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**asked, max_new_tokens=12, do_sample=False)[0][asked["input_ids"].shape[1] :]
        right += tokenizer.decode(made, skip_special_tokens=True) == messages[1]["content"]
    assert right >= 8, right


def check_asked(file: Path) -> None:
    """Of every row, answers and the ends of their turns."""
    tokenizer = AutoTokenizer.from_pretrained("base")
    for row in samples(with_prepared(read_job(file), file), 1, 0).rows:
        said = tokenizer.decode([row.tokens[at] for at in row.asked])
        assert re.fullmatch(r"(\w+\.<\|im_end\|>)+", said), said
