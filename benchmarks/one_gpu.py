"""Tokens/s of one device on one GPU, without failures, beside plain loops of torch, in rounds in which they
take turns.

    python benchmarks/one_gpu.py [--rounds 3] [--steps 4] [--models gpt2,llama] [--compile] [--limit 300]
                                 [--page FILE] [--kind cuda]

A GPT-2 of 163 million parameters, micro-batches of 8 rows of 1,024 tokens, and four blocks of Llama 7B with
embedding and head, micro-batches of one row of 4,096; bf16, 8 micro-batches a step. Ours is a device without
agent and peers: exact sums, digests and guards as they are by default; with ``--compile`` also one whose job
has ``train.compile``. Torch's loop is plain, with its deterministic algorithms, and with those and compiled.
After ``--limit`` seconds no round is begun. Writes a page in Markdown; the last line is one JSON object.
``--kind cpu`` shrinks all of it, to try the script out and for nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.asked import AskedProgram
from benchmarks.peers.launch import PeerFailed, endable
from benchmarks.ratios import median_interval
from benchmarks.tables import table
from oobleckd.planner.costs.devices import has_peak, sheet_of

WARM_UP = 1
PLAIN, DETERMINISTIC, COMPILED = "plain", "deterministic", "compiled"
OURS, OURS_COMPILED = "oobleckd", "oobleckd, compiled"
NAMES = {
    PLAIN: "torch",
    DETERMINISTIC: "torch, deterministic",
    COMPILED: "torch, deterministic, compiled",
    OURS: OURS,
    OURS_COMPILED: OURS_COMPILED,
}
RATIOS = (
    (OURS, PLAIN, None),
    (OURS, DETERMINISTIC, 0.97),
    (OURS_COMPILED, COMPILED, 0.95),
    (OURS_COMPILED, DETERMINISTIC, None),
    (OURS, COMPILED, None),
)
"""(ours, beside what, the least there is to be)."""
_TIMEOUT_S = 280.0
_PLAIN_LOOP, _ALONE = "benchmarks.peers.train_plain", "benchmarks.alone"
_DROPOUTS = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
_PAGE = Path(__file__).parent / "one_gpu.md"


@dataclass(frozen=True, slots=True)
class Model:
    """``name`` for people, fields of its config, and a micro-batch."""

    name: str
    family: str
    config: dict[str, Any]
    micro_batch: int
    sequence: int

    @property
    def setting(self) -> dict[str, Any]:
        """What programs are told."""
        return {
            "family": self.family, "model": self.config, "global_batch": 8 * self.micro_batch,
            "micro_batch": self.micro_batch, "sequence": self.sequence, "lr": 3e-4,
        }  # fmt: skip

    @property
    def tokens(self) -> int:
        """Of a step."""
        return 8 * self.micro_batch * self.sequence


def gpt2(width: int, heads: int, blocks: int, vocabulary: int, context: int) -> dict[str, Any]:
    """Fields of ``GPT2Config``."""
    size = {"n_embd": width, "n_head": heads, "n_layer": blocks, "vocab_size": vocabulary}
    return {**size, "n_positions": context, **_DROPOUTS, **_ENDS}


def llama(width: int, inner: int, heads: int, blocks: int, vocabulary: int, context: int) -> dict[str, Any]:
    """Fields of ``LlamaConfig``."""
    size = {"hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads}
    rest = {"num_hidden_layers": blocks, "vocab_size": vocabulary, "max_position_embeddings": context}
    return {**size, **rest, **_ENDS}


MODELS = {
    "cuda": {
        "gpt2": Model(
            "GPT-2, 163 million parameters", "gpt2", gpt2(768, 12, 12, 50_257, 1024), 8, 1024
        ),
        "llama": Model(
            "four blocks of Llama 7B, embedding and head", "llama",
            llama(4096, 11_008, 32, 4, 32_000, 4096), 1, 4096,
        ),
    },
    "cpu": {
        "gpt2": Model("GPT-2, shrunk", "gpt2", gpt2(64, 2, 2, 256, 64), 2, 64),
        "llama": Model("Llama, shrunk", "llama", llama(64, 128, 2, 2, 256, 128), 1, 128),
    },
}  # fmt: skip


@dataclass(slots=True)
class Measured:
    """Of one model. ``rates``: loop -> tokens/s of each round; ``peak_bytes``: loop -> of memory; ``rows``:
    loop -> the longest of a profile of a step. ``about``: what our program said of itself.
    """

    model: Model
    about: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


class Turns:
    """Rounds of all loops of one model, until ``deadline_s`` (monotonic)."""

    def __init__(self, args: argparse.Namespace, deadline_s: float) -> None:
        self.args, self.deadline_s = args, deadline_s

    def take(self, model: Model, folder: Path) -> Measured:
        """Measure ``model``: the loops that are not compiled first, and then those that are.

        One after the other, as not all of their states have room on a card at once.
        """
        found, file = Measured(model), folder / f"{model.family}.json"
        file.write_text(json.dumps(model.setting))
        config = ("--config", str(file), "--kind", self.args.kind)
        with AskedProgram(folder, _PLAIN_LOOP, *config, timeout_s=_TIMEOUT_S) as peer:
            with AskedProgram(folder, _ALONE, *config, timeout_s=_TIMEOUT_S) as ours:
                found.about = dict(ours.about)
                half_s = (time.monotonic() + self.deadline_s) / 2
                self._rounds(found, {PLAIN: peer, OURS: ours, DETERMINISTIC: peer}, half_s)
            with contextlib.ExitStack() as stack:
                loops = {COMPILED: peer}
                if self.args.compile:
                    compiled = AskedProgram(folder, _ALONE, *config, "--compile", timeout_s=_TIMEOUT_S)
                    loops[OURS_COMPILED] = stack.enter_context(compiled)
                self._rounds(found, loops, self.deadline_s)
        return found

    def _rounds(self, found: Measured, loops: dict[str, AskedProgram], deadline_s: float) -> None:
        for name, program in loops.items():  # kernels are loaded, or compiled
            program.ask(name, warm_up=1)
        names, took_s = list(loops), 0.0
        for turn in range(self.args.rounds):
            began_s = time.monotonic()
            if turn and began_s + took_s > deadline_s:
                _say(f"{found.model.name}: no time for round {turn + 1}")
                break
            for name in names[::-1] if turn % 2 else names:
                answer = loops[name].ask(name, steps=self.args.steps, warm_up=WARM_UP)
                rate = self.args.steps * found.model.tokens / answer["seconds"]
                found.rates.setdefault(name, []).append(rate)
                found.peak_bytes[name] = max(answer["peak_bytes"], found.peak_bytes.get(name, 0))
                _say(
                    f"{found.model.name}, {turn + 1}/{self.args.rounds}, {NAMES[name]}: {rate:,.0f} tokens/s"
                )
            took_s = time.monotonic() - began_s
        for name, program in loops.items():
            found.rows[name] = program.ask(name, profile=True)["rows"]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- the report


def ratios_of(found: Measured) -> dict[str, dict[str, Any]]:
    """Ours over a peer, round by round where both took turns in the same rounds, else of their medians."""
    told = {}
    for ours, peer, least in RATIOS:
        if {ours, peer} <= found.rates.keys():
            mine, other = found.rates[ours], found.rates[peer]
            together = (ours == OURS) == (peer != COMPILED)
            each = [a / b for a, b in zip(mine, other, strict=False)]
            interval = median_interval(each if together else [_median(mine) / _median(other)])
            name = f"{NAMES[ours]} / {NAMES[peer]}"
            told[name] = {**asdict(interval), "least": least, "in_turns": together}
    return told


def meets_its_goals(found: Measured) -> bool:
    """Whether no ratio is below the least there is to be."""
    return all(told["median"] >= (told["least"] or 0.0) for told in ratios_of(found).values())


def mfu_of(found: Measured, loop: str) -> float | None:
    """Of the median rate, by the data sheet of the device; None where no peak is known."""
    sheet = sheet_of(found.about["device"])
    if sheet is None or not has_peak(sheet):
        return None
    rate: float = _median(found.rates[loop])
    return rate * float(found.about["flops_per_token"]) / sheet.peak("bf16")


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def figures(found: Measured) -> list[list[str]]:
    """The rows of a table of all loops."""
    rows = []
    for loop, rates in found.rates.items():
        mfu = mfu_of(found, loop)
        rows.append([
            NAMES[loop], f"{_median(rates):,.0f}", "-" if mfu is None else f"{mfu:.1%}",
            f"{found.peak_bytes[loop] / 2**30:.2f}",
        ])  # fmt: skip
    return rows


def ratio_rows(found: Measured) -> list[list[str]]:
    """The rows of a table of all ratios."""
    rows = []
    for name, told in ratios_of(found).items():
        least, turns = told["least"], "in turns" if told["in_turns"] else "one after the other"
        verdict = "" if least is None else "met" if told["median"] >= least else "missed"
        spread = f"{told['low']:.3f}-{told['high']:.3f}" if told["in_turns"] else ""
        rows.append([name, f"{told['median']:.3f}", spread, turns, "" if least is None else f">= {least}",
                     verdict])  # fmt: skip
    return rows


HEADERS = (["loop", "tokens/s", "MFU", "peak GiB"], ["ratio", "median", "from-to", "how", "goal", ""])


def page_of(all_found: Sequence[Measured], kind: str, at: dt.datetime) -> str:
    """The page, in Markdown."""
    about = all_found[0].about
    parts = [
        "# One device on one GPU",
        f"`benchmarks/one_gpu.py` wrote this on {at:%Y-%m-%d}: {about['device']}, torch {about['torch']}.",
        "What is compared: [README.md](README.md#one_gpupy).",
    ]
    if kind == "cpu":
        parts.append("**A rehearsal on a CPU with shrunk models: no figure here means anything.**")
    for found in all_found:
        model = found.model
        parts += [
            f"## {model.name}",
            f"bf16, 8 micro-batches a step, each of {model.micro_batch} x {model.sequence:,} tokens.",
            *(_markdown(header, rows) for header, rows in zip(
                HEADERS, (figures(found), ratio_rows(found)), strict=True)),
        ]  # fmt: skip
        for loop, rows in found.rows.items():
            parts += [f"### {NAMES[loop]}: what took longest in a step", _markdown(*_profile(rows))]
    return "\n\n".join(parts) + "\n"


def _profile(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    cells = [
        [f"`{row['name'][:70]}`", f"{row['ms']:.2f}", f"{row['share']:.1%}", str(row["count"])]
        for row in rows
    ]
    return ["operator or kernel", "ms", "share", "runs"], cells


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def report(all_found: Sequence[Measured], kind: str) -> dict[str, object]:
    """Print the tables; returns what the JSON line says."""
    models = {}
    for found in all_found:
        print(table([found.model.name, *HEADERS[0][1:]], figures(found)), end="\n\n")
        print(table(HEADERS[1], ratio_rows(found)), end="\n\n")
        models[found.model.family] = {
            "rates": found.rates, "peak_bytes": found.peak_bytes, "ratios": ratios_of(found),
            "mfu": {loop: mfu_of(found, loop) for loop in found.rates}, "rows": found.rows,
            "about": found.about,
        }  # fmt: skip
    return {"bench": "one_gpu", "kind": kind, "models": models, "load1": os.getloadavg()[0]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a window")
    parser.add_argument("--models", default="gpt2,llama")
    parser.add_argument("--compile", action="store_true", help="ours also with train.compile")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which no round is begun")
    parser.add_argument("--page", type=Path, help="default: benchmarks/one_gpu.md; on a CPU none")
    parser.add_argument("--kind", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    models = [model for name, model in MODELS[args.kind].items() if name in args.models.split(",")]
    page = args.page or (_PAGE if args.kind == "cuda" else None)
    all_found: list[Measured] = []
    began_s, failed = time.monotonic(), ""
    with tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder:
        for number, model in enumerate(models, start=1):
            turns = Turns(args, began_s + args.limit * number / len(models))
            try:
                all_found.append(turns.take(model, Path(folder)))
            except PeerFailed as error:
                failed = f"{model.name}: {error}"
                print(f"error: {failed}", file=sys.stderr)
            if all_found and page is not None:  # now, in case that something ends this
                page.write_text(page_of(all_found, args.kind, dt.datetime.now(dt.UTC)), encoding="utf-8")
    told = report(all_found, args.kind)
    print(json.dumps({**told, "failed": failed}))
    missed = args.kind == "cuda" and not all(meets_its_goals(found) for found in all_found)
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(endable(main))
