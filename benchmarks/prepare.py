"""What ``oobleckctl data prepare`` costs beside ``tokenizers`` alone: CPU seconds for the same text, in
turns, by as many processes.

    python benchmarks/prepare.py [--megabytes 20] [--rounds 3] [--source jsonl] [--jobs 1]

The text is paragraphs of Python's standard library, the tokenizer a byte-level BPE of 8,000 made of them.
Exit code 1 where the median of the ratios is above 1.3.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MOST = 1.3
ALONE = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
with open(sys.argv[2], encoding="utf-8") as file:
    documents = [json.loads(line)["text"] for line in file][int(sys.argv[3]) :: int(sys.argv[4])]
for first in range(0, len(documents), 512):
    tokenizer.encode_batch_fast(documents[first : first + 512], add_special_tokens=False)
"""


def make(folder: Path, megabytes: float) -> None:
    """A JSONL file and a Parquet file of documents, and a tokenizer."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))[:1500]
    texts = [file.read_text(errors="ignore") for file in files if "site-packages" not in file.parts]
    paragraphs = [each for text in texts for each in text.split("\n\n") if len(each) > 40]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(paragraphs[:8000], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    chance, documents, size = random.Random(0), [], 0
    while size < megabytes * 1e6:
        documents.append("\n\n".join(chance.sample(paragraphs, chance.randint(1, 12))))
        size += len(documents[-1].encode())
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": documents}), folder / "text.parquet", row_group_size=2000)


def job(folder: Path, source: str) -> Path:
    """A job.toml on it."""
    file = folder / "job.toml"
    file.write_text(
        f'name = "a"\n[train]\nsteps = 1\nglobal_batch = 1\nmicro_batch = 1\nsequence = 64\n[data]\n'
        f'source = "{source}"\npath = "{folder}/text.{source}"\ntokenizer = "{folder}/tokenizer.json"\n'
    )
    return file


def cpu_s(*commands: list[str]) -> float:
    """CPU seconds of programs that run at the same time, and of all that they started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = [subprocess.Popen(each, stdout=subprocess.DEVNULL) for each in commands]
    assert not any([each.wait() for each in running])  # noqa: C419 - all are waited for
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure in turns, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", choices=["jsonl", "parquet"], default="jsonl")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make(folder, asked.megabytes)
        file = job(folder, asked.source)
        words = [str(folder / "tokenizer.json"), str(folder / "text.jsonl")]
        alone = [
            [sys.executable, "-P", "-c", ALONE, *words, str(number), str(asked.jobs)]
            for number in range(asked.jobs)
        ]
        ours = [sys.executable, "-P", "-m", "oobleckd.ctl.main", "data", "prepare", str(file)]
        ours += ["--jobs", str(asked.jobs)]
        ratios, every = [], []
        for number in range(asked.rounds):
            measured: dict[str, float] = {}
            turns: list[tuple[str, Callable[[], float]]] = [
                ("alone", lambda: cpu_s(*alone)),
                ("prepare", lambda: cpu_s(ours)),
            ]
            for name, measure in turns if number % 2 == 0 else reversed(turns):
                measured[name] = measure()
            shutil.rmtree(folder / "prepared")
            ratios.append(measured["prepare"] / measured["alone"])
            every.append(measured)
            print(
                f"tokenizers alone {measured['alone']:.2f} CPU s, prepare {measured['prepare']:.2f} CPU s: "
                f"{ratios[-1]:.2f}",
                flush=True,
            )
    median = statistics.median(ratios)
    print(f"{asked.megabytes:.0f} MB of {asked.source}: {median:.2f} of tokenizers alone (at most {MOST})")
    print(json.dumps({**vars(asked), "cpu_s": every, "ratio": median, "load1": os.getloadavg()[0]}))
    sys.exit(median > MOST)


if __name__ == "__main__":
    main()
