"""How the state folders, the replay bundle and the digests beside this file were made: by the programs of
earlier commits, before later ones changed them.

Not run by tests, and of no use on a later commit: what it wrote is what must go on opening. Needs root, for a
folder whose path means nothing (``ROOT``).

    python tests/data/make.py BIN state-4     # BIN: .venv/bin of commit 5c34964
    python tests/data/make.py BIN state-3     # BIN: .venv/bin of commit 83e037b
    python tests/data/make.py BIN digests     # 5c34964
    python tests/data/make.py BIN bundle      # 5c34964
    python tests/data/make.py BIN rows        # a77562b: `prepared`, and the digests of the jobs on it
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DATA = Path(__file__).parent
ROOT = Path("/tests-data")
STATE = ROOT / "state"
# Arithmetic that every x86-64 processor of the last ten years does alike.
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}
ROWS = ("llama-mixture", "bert-padded")
JOBS = ("gpt2-fp32", "llama-bf16", "bert-masked", "qwen2-folder", "gpt2-float-sums", "done", "long")


class Made:
    """The programs in one folder, on a state folder in ROOT."""

    def __init__(self, bin_: Path) -> None:
        self.bin = bin_
        self.env = {**os.environ, **PORTABLE, "OOBLECK_STATE": str(STATE)}

    def ctl(self, *words: str) -> str:
        command = [str(self.bin / "oobleckctl"), *words]
        return subprocess.run(
            command, env=self.env, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    def killed(self) -> None:
        """End all of the cluster's processes as a power cut would."""
        for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if f"OOBLECK_STATE={STATE}".encode() in environ.split(b"\0") and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)


def inputs() -> None:
    """What jobs read, in ROOT."""
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir()
    shutil.copy(DATA / "text.txt", ROOT)
    shutil.copy(DATA / "tokens.bin", ROOT)
    shutil.copytree(DATA / "qwen2", ROOT / "qwen2")
    if (DATA / "prepared").exists():
        shutil.copytree(DATA / "prepared", ROOT / "prepared")


def folders() -> None:
    """Prepared folders, of text and of chats, with plans for the jobs ``ROWS``."""
    import numpy as np

    sys.path.insert(0, str(DATA.parents[1]))
    from oobleckd.host.jobfile import load_job
    from oobleckd.protocol.job import jobs_of_sources
    from tests.helpers.prepared import planned, prepared

    dice = np.random.default_rng(43)

    def documents(count: int, longest: int) -> list[np.ndarray]:
        lengths = dice.integers(1, longest, count)
        return [dice.integers(0, 256, length) for length in lengths]

    shutil.rmtree(ROOT / "prepared", ignore_errors=True)
    prepared(ROOT / "prepared" / ("7" * 32), documents(120, 40), "uint16")
    chats = documents(80, 24)
    asked = [np.arange(len(chat)) >= dice.integers(0, len(chat)) for chat in chats]
    prepared(ROOT / "prepared" / ("c" * 32), chats, "uint16", asked=asked)
    for name in ROWS:
        for _, part in jobs_of_sources(load_job(DATA / "jobs" / f"{name}.toml")):
            planned(part)
    shutil.rmtree(DATA / "prepared", ignore_errors=True)
    shutil.copytree(ROOT / "prepared", DATA / "prepared")


@contextmanager
def cluster(made: Made, nodes: int) -> Iterator[None]:
    shutil.rmtree(STATE, ignore_errors=True)
    made.ctl("up", "--nodes", str(nodes), "--no-spare")
    try:
        yield
    finally:
        made.killed()


def keep(name: str) -> None:
    """What matters of the state folder: the daemon's part, without logs and sockets."""
    target = DATA / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(
        STATE / "daemon", target, ignore=shutil.ignore_patterns("*.log", "*.sock", "lock", "*-shm")
    )


def states(made: Made, format_: str) -> None:
    for name in ("running", "paused"):
        with cluster(made, 2):
            made.ctl("submit", str(DATA / "jobs" / "done.toml"))
            made.ctl("wait", "done", "--for", "state=done")
            made.ctl("submit", str(DATA / "jobs" / "long.toml"))
            made.ctl("wait", "long", "--for", "step=50")
            if name == "paused":
                made.ctl("pause", "long")
                made.ctl("wait", "long", "--for", "state=paused")
                time.sleep(1.0)  # what is written beside training
            made.killed()
        keep(f"state-{format_}-{name}")


def bundle(made: Made) -> None:
    with cluster(made, 3):
        made.ctl("submit", str(DATA / "jobs" / "long.toml"))
        made.ctl("wait", "long", "--for", "step=20")
        made.ctl("kill-node", "node-2", "--how", "sigkill")
        made.ctl("wait", "long", "--for", "incidents=1")
        made.ctl("wait", "long", "--for", "state=done")
        incident = json.loads(made.ctl("get", "incidents", "-o", "json"))["items"][0]["id"]
        made.ctl("export-incident", incident, "-o", str(DATA / "incident.json"))


def digests(made: Made, names: tuple[str, ...] = JOBS) -> None:
    """Of these jobs, by one process each, without a cluster. Those of others stay."""
    file = DATA / "digests.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for name in names:
        out = ROOT / "out" / name
        twin = [
            str(made.bin / "python"),
            "-P",
            "-m",
            "oobleckd.worker.tools.reference",
            "--job",
            str(DATA / "jobs" / f"{name}.toml"),
            "--out",
            str(out),
        ]
        subprocess.run(twin, env=made.env, check=True, cwd=made.bin.parents[1])
        (manifest,) = out.glob("step-*/manifest.json")
        buckets = json.loads(manifest.read_text())["buckets"]
        tensors = sorted(item for bucket in buckets for item in bucket["tensors"].items())
        losses = [json.loads(line)["loss_hex"] for line in (out / "steps.jsonl").read_text().splitlines()]
        found[name] = {
            "losses": hashlib.sha256("\n".join(losses).encode()).hexdigest(),
            "tensors": hashlib.sha256(
                "\n".join(f"{key} {value}" for key, value in tensors).encode()
            ).hexdigest(),
            "last_loss": losses[-1],
        }
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    made, what = Made(Path(sys.argv[1]).absolute()), sys.argv[2]
    inputs()
    if what == "digests":
        digests(made)
    elif what == "bundle":
        bundle(made)
    elif what == "rows":
        folders()
        digests(made, ROWS)
    else:
        states(made, what.removeprefix("state-"))
