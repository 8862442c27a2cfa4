"""The verb ``plan``: no daemon, no cluster; what it prints, what it refuses, what it may not load.

``python -m tests.unit.ctl.test_plan`` writes plan.txt and recompute.txt, the golden texts, anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import msgspec
import pytest
from click.testing import CliRunner, Result

from oobleckd.core.entries import ProfileMeasured
from oobleckd.core.jobs import profile_key
from oobleckd.ctl.main import main
from oobleckd.ctl.profiles import analytic, limit_bytes
from oobleckd.ctl.world import PlannedWorld
from oobleckd.daemon.journal import Journal
from oobleckd.host.jobfile import load_job
from oobleckd.planner.costs.devices import SHEETS
from oobleckd.planner.policy import Action
from oobleckd.planner.profile import Profile
from oobleckd.planner.schedules.timeline import dry_run_plan
from oobleckd.protocol.forecast import Forecast
from oobleckd.protocol.parts import DeviceInfo
from tests.helpers.optimizers import installed
from tests.unit.planner.build import even_profile
from tests.unit.test_imports import ROOT

GOLDEN = Path(__file__).with_name("plan.txt")
GOLDEN_AGAIN = Path(__file__).with_name("recompute.txt")
EXAMPLE = str(ROOT / "examples" / "gpt2-stdlib.toml")
JobFile = Callable[[str], Path]


def ctl(*words: str) -> Result:
    with patch.dict(os.environ, COLUMNS="100"):
        return CliRunner().invoke(main, ["plan", *words], catch_exceptions=False)


def planned(*words: str) -> Forecast:
    result = ctl(*words, "-o", "json")
    assert result.exit_code == 0, result.stderr
    return msgspec.json.decode(result.stdout, type=Forecast)


def refused(*words: str, code: int = 2) -> str:
    result = ctl(*words)
    assert result.exit_code == code
    assert result.stdout == ""
    problem, hint = result.stderr.splitlines()
    assert problem.startswith("error: ")
    assert hint.startswith("hint: ")
    return result.stderr


# --------------------------------------------------------------------------- what it says


def golden() -> str:
    return ctl(EXAMPLE, "--nodes", "7", "--without", "node-3").stdout


def test_text() -> None:
    assert golden() == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.usefixtures("based")
def test_parameters_are_listed_with_group_rule_and_bytes(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        """name = "p"
        train = { steps = 1, global_batch = 2, micro_batch = 2, sequence = 8 }
        model = { family = "gpt2", config = { n_layer = 1, n_embd = 16, n_head = 2, vocab_size = 64 } }
        [optimizer]
        name = "muon"
        group = [{ match = "*.wpe.*", frozen = true }, { match = "*.none", lr_scale = 2 }]
        """,
        encoding="utf-8",
    )
    done = ctl(str(file), "--parameters")
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line for line in done.output.splitlines() if line.startswith("transformer.")}
    assert re.search(r"1024 x 16 +\*\.wpe\.\* +frozen +- +- +64 KiB", rows["transformer.wpe.weight"])
    assert re.search(r"16 x 64 +- +muon +1 +0.01 +8 KiB", rows["transformer.h.0.mlp.c_fc.weight"])
    assert re.search(r"64 x 16 +- +adamw +1 +0.01 +12 KiB", rows["transformer.wte.weight"])
    assert "optimizer.group[1].match: '*.none' has no parameters; nodes would refuse it" in done.stderr


RULED = """name = "ruled"
train = { steps = 1, global_batch = 8, micro_batch = 2, sequence = 64 }
data = { source = "stdlib" }
model = { family = "gpt2", config = { n_layer = 4, n_embd = 64, n_head = 2, vocab_size = 256 } }
"""


def memory_of(tmp_path: Path, rule: str) -> tuple[int, str]:
    """What the largest stage takes on a device under ``rule``, and what is said besides."""
    file = tmp_path / "job.toml"
    file.write_text(f'{RULED}[optimizer]\nname = "{rule}"\n', encoding="utf-8")
    result = ctl(str(file), "--nodes", "2", "-o", "json")
    assert result.exit_code == 0, result.stderr
    return msgspec.json.decode(result.stdout, type=Forecast).plan.memory_bytes, result.stderr


def test_a_rule_of_an_installed_package_is_asked_what_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = installed(tmp_path, good="Good")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    # It keeps one number for each, as lion does.
    assert memory_of(tmp_path, "good")[0] == memory_of(tmp_path, "lion")[0]


def test_a_rule_that_nobody_here_knows_is_taken_for_adamw_and_that_is_said(tmp_path: Path) -> None:
    found, said = memory_of(tmp_path, "elsewhere")
    assert "no package on this machine has the rule 'elsewhere', so its memory is taken for AdamW's" in said
    assert found == memory_of(tmp_path, "adam")[0]


def test_document() -> None:
    document = json.loads(ctl(EXAMPLE, "--nodes", "7", "-o", "json").stdout)
    assert (document["apiVersion"], document["kind"]) == ("oobleck/v1", "Forecast")
    found = planned(EXAMPLE, "--nodes", "7")
    assert [t.num_nodes for t in found.templates] == [2, 3, 4, 5, 6]
    assert sum(group.num_nodes * group.count for group in found.plan.groups) == 7
    assert sum(group.micro_batches * group.count for group in found.plan.groups) == 12
    assert (found.plan.can_lose, found.guarantee.n0, found.guarantee.full_down_to) == (2, 2, 6)
    assert found.plan.memory_bytes <= found.memory_bytes == 42 << 20
    assert [loss.nodes for loss in found.losses] == [(f"node-{n}",) for n in range(1, 8)]
    for loss in found.losses:
        assert loss.plan is not None
        assert loss.plan.can_lose == 2
        assert not loss.lost_layers
        assert loss.copied_bytes > 0
    assert found.change is None


def test_the_exchange_of_gradients_is_said_and_counted_where_the_job_says_its_link() -> None:
    """1 GB/s is what a plan takes where nobody says a link, so nothing else is different with it."""
    words = (EXAMPLE, "--nodes", "6")
    free, counted = planned(*words), planned(*words, "--set", "resources.link=1GB/s")
    before, after = free.plan.exchange, counted.plan.exchange
    assert (before.counted, after.counted) == (False, True)
    assert msgspec.structs.replace(before, counted=True) == after
    assert free.plan.groups == counted.plan.groups
    assert after.shown_s > 0
    assert counted.plan.step_s == pytest.approx(free.plan.step_s + after.shown_s)
    for loss in (*free.losses, *counted.losses):
        assert loss.plan is not None
        assert loss.plan.exchange.sent_bytes > 0
        assert loss.plan.exchange.counted == (loss in counted.losses)

    # Three holders of each layer, and six of the tied weight, which the first and the last stage have.
    job = load_job(Path(EXAMPLE))
    profile = analytic(job, SHEETS["cpu"])
    params = [layer.param_bytes / 4 for layer in profile.layers]
    tied = sum(params) - profile.params
    (template,) = [each for each in free.templates if each.instances]
    stages = [sum(params[each.start : each.stop]) - tied for each in template.stages]
    assert (len(stages), free.plan.groups[0].count) == (2, 3)
    assert after.sent_bytes == after.checked_bytes == round(12 * max(stages) + 16 * tied)
    assert after.waiting_bytes == round(16 / 3 * max(stages) + 16 / 6 * tied)
    seldom = planned(*words, "--set", "fault_tolerance.check_every=10").plan.exchange
    assert seldom.checked_bytes == after.checked_bytes
    assert seldom.sent_bytes == pytest.approx(
        0.9 * (8 * max(stages) + 10 * tied) + 0.1 * after.sent_bytes, abs=1
    )


def test_the_exchange_in_words() -> None:
    def told(*words: str) -> tuple[str, str]:
        text = ctl(EXAMPLE, "--nodes", "6", *words).stdout
        line = next(line for line in text.splitlines() if line.startswith("exchange:"))
        return line, next(line for line in text.splitlines() if line.startswith("LOST"))

    free, free_table = told()
    assert "not in the step, as resources.link is not set" in free
    assert "would show at 1 GB/s)" in free
    assert "EXCHANGE" not in free_table
    counted, table = told("--set", "resources.link=1GB/s", "--set", "fault_tolerance.check_every=10")
    assert re.search(r"each step \([\d.]+ MiB where replicas are compared\); [\d.]+ ms of the step", counted)
    assert "EXCHANGE" in table
    text = ctl(EXAMPLE, "--nodes", "2").stdout
    assert "exchange:  none" not in text  # the ends of one pipeline share the tied weight
    assert "none: no layer has a second holder" in GOLDEN_AGAIN.read_text(encoding="utf-8")


def test_the_losses_are_those_of_the_plan_without_what_is_gone() -> None:
    found = planned(EXAMPLE, "--nodes", "7", "--without", "6", "--without", "node-3")
    assert found.without == ("node-3", "node-6")
    assert found.change is not None
    assert found.change.plan == found.plan
    assert {loss.nodes[0] for loss in found.losses} == {"node-1", "node-2", "node-4", "node-5", "node-7"}
    assert all(loss.plan is not None and loss.plan.can_lose == 1 for loss in found.losses)


def test_under_slipstream_a_loss_copies_nothing_and_leaves_a_vacant_place(tmp_path: Path) -> None:
    text = Path(EXAMPLE).read_text(encoding="utf-8")
    text = text.replace("[fault_tolerance]", '[fault_tolerance]\npolicy = "slipstream"')
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    file = str(tmp_path / "job.toml")
    found = planned(file, "--nodes", "6", "--without", "node-3")
    assert found.change is not None
    assert found.change.plan == found.plan
    assert found.change.copied_bytes == 0
    (action,) = found.change.actions
    assert (found.change.way, action.kind, action.whose) == ("re-route", "re-route", ("node-3",))
    assert [p.vacant for p in found.pipelines if p.vacant] == [("node-3/0",)]
    before = planned(file, "--nodes", "6")
    assert found.plan.can_lose == before.plan.can_lose - 1
    assert found.plan.step_s > before.plan.step_s
    assert 0 < found.plan.bubble < 1


def test_under_varuna_a_loss_leads_back_to_the_checkpoint(tmp_path: Path) -> None:
    text = Path(EXAMPLE).read_text(encoding="utf-8")
    text = text.replace("[fault_tolerance]", '[fault_tolerance]\npolicy = "varuna"')
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    file = str(tmp_path / "job.toml")
    found = planned(file, "--nodes", "7", "--without", "node-3")
    assert found.change is not None
    assert found.change.rolls_back
    assert found.change.copied_bytes == 0
    assert found.change.lost_layers == ()
    assert found.change.way == "morph"
    assert found.plan.can_lose == found.guarantee.can_lose == 0
    assert found.guarantee.rolls_back
    assert len({len(pipeline.nodes) for pipeline in found.pipelines}) == 1
    said = ctl(file, "--nodes", "7", "--without", "node-3").stdout
    assert "none without going back to the last checkpoint" in said
    assert "the steps since the last checkpoint" in said
    whole = planned(file, "--nodes", "7")
    assert whole.plan.idle == 7 - sum(group.count * group.num_nodes for group in whole.plan.groups)


def test_under_bamboo_the_predecessor_takes_over(tmp_path: Path) -> None:
    text = Path(EXAMPLE).read_text(encoding="utf-8")
    text = text.replace("[fault_tolerance]", '[fault_tolerance]\npolicy = "bamboo"')
    text = text.replace("[resources]", "[resources]\nmin_pipeline_nodes = 3", 1)
    text = re.sub(r"device_memory = .*", "", text)
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    file = str(tmp_path / "job.toml")
    before = planned(file, "--nodes", "6")
    assert [len(pipeline.nodes) for pipeline in before.pipelines] == [3, 3]
    assert before.plan.can_lose == 3
    found = planned(file, "--nodes", "6", "--without", "node-2")
    assert found.change is not None
    assert found.change.copied_bytes == 0
    assert found.change.actions == (Action("take-over", ("node-1",), ("node-2",)),)
    assert found.plan.can_lose == 2


def test_all_copies_of_a_layer_lost() -> None:
    found = planned(EXAMPLE, "--nodes", "5", "--without", "node-1", "--without", "node-3")
    assert found.change is not None
    assert found.change.lost_layers == (0, 1, 2, 3)
    assert (
        "back to the last checkpoint"
        in ctl(EXAMPLE, "--nodes", "5", "--without", "1", "--without", "3").stdout
    )


def test_nodes_without_a_place(tmp_path: Path, job_file: JobFile) -> None:
    """Five equal layers of 180 bytes of state, of which two fit a device with little in flight."""
    file = tmp_path / "profile.json"
    file.write_bytes(msgspec.json.encode(even_profile(5)))
    words = (
        str(
            job_file(
                "[resources]\ndevice_memory = 410\n[schedule]\nboundary_memory = 0\n[checkpoint]\nevery = 0\n"
            )
        ),
        "--nodes",
        "7",
        "--profile",
        str(file),
    )
    found = planned(*words)
    assert (found.guarantee.n0, found.guarantee.n_max, found.guarantee.idle) == (4, 5, ((6, 7),))
    assert (found.plan.idle, found.plan.idle_reason) == (2, "7 nodes do not split into pipelines of 4 to 5")
    text = ctl(*words).stdout
    assert "2: 7 nodes do not split into pipelines of 4 to 5" in text
    assert "but 6 to 7" in text


def test_too_few_left_after_a_loss() -> None:
    found = planned(EXAMPLE, "--nodes", "2")
    assert [(loss.plan, loss.way) for loss in found.losses] == [(None, "wait")] * 2
    assert "waits: 1 usable node, and the model needs 2" in ctl(EXAMPLE, "--nodes", "2").stdout


def test_standbys_take_the_place(job_file: JobFile) -> None:
    file = str(job_file("[resources]\nmax_nodes = 2\n"))
    found = planned(file, "--nodes", "5")
    assert found.standby == 3
    assert "standing by: 3" in ctl(file, "--nodes", "5").stdout
    assert sum(group.num_nodes * group.count for group in found.plan.groups) == 2
    assert [[(a.kind, a.nodes) for a in loss.actions] for loss in found.losses] == [
        [("take-place", ("node-3",))]
    ] * 2


def test_sixteen_thousand_nodes() -> None:
    result = ctl(EXAMPLE, "--nodes", "16384", "--devices", "8")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) < 60
    found = planned(EXAMPLE, "--nodes", "16384", "--devices", "8")
    assert not found.pipelines
    assert sum(group.num_nodes * group.count for group in found.plan.groups) == 16384
    assert sum(loss.alike for loss in found.losses) == found.plan.can_lose + 1
    for loss in found.losses:
        assert loss.plan is not None
        assert sum(group.num_nodes * group.count for group in loss.plan.groups) + loss.plan.idle == 16383


def test_a_change_over_some_pipelines_keeps_what_one_over_all_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planned(EXAMPLE, "--nodes", "41")
    monkeypatch.setattr("oobleckd.ctl.world.NODES_AT_ONCE", 20)
    monkeypatch.setattr("oobleckd.ctl.world.CONSIDERED", 20)
    part = planned(EXAMPLE, "--nodes", "41")
    assert part.plan == whole.plan
    for all_over, some in zip(whole.losses, part.losses, strict=True):
        assert some.considered < all_over.considered
        assert all_over.plan is not None
        assert some.plan is not None
        assert sum(group.num_nodes * group.count for group in some.plan.groups) == 40
        assert abs(some.plan.can_lose - all_over.plan.can_lose) <= 1
        assert some.plan.step_s == pytest.approx(all_over.plan.step_s, rel=0.2)


def test_the_drawing_is_of_the_deepest_pipeline() -> None:
    schedule = planned(EXAMPLE, "--nodes", "7").schedule
    assert (schedule.num_nodes, schedule.micro_batches, schedule.of_micro_batches) == (3, 5, 5)
    assert [op.op for op in schedule.stages[2]][:4] == ["2F0", "2B0", "2F1", "2B1"]
    assert schedule.makespan_s == max(op.stop_s for ops in schedule.stages for op in ops)


def test_two_chunks_a_device(tmp_path: Path, job_file: JobFile) -> None:
    file = tmp_path / "profile.json"
    file.write_bytes(msgspec.json.encode(even_profile(12)))
    at = "--nodes", "4", "--profile", str(file)
    more = '[resources]\nmin_pipeline_nodes = 2\n[schedule]\nbackward = "decoupled"\n'
    found, plain = planned(str(job_file(more)), *at), planned(str(job_file(f"{more}chunks = 1\n")), *at)
    assert (found.templates[0].chunks, len(found.templates[0].stages)) == (2, 4)
    assert (plain.templates[0].chunks, len(plain.templates[0].stages)) == (1, 2)
    assert found.plan.step_s < plain.plan.step_s
    assert found.plan.bubble < plain.plan.bubble
    assert (found.schedule.decoupled, found.schedule.chunks, len(found.schedule.stages)) == (True, 2, 2)
    assert {op.op.strip("0123456789") for ops in found.schedule.stages for op in ops} == {"F", "I", "W"}
    text = ctl(str(job_file(more)), *at).stdout
    assert "decoupled schedule of a pipeline of 2 nodes" in text
    assert "stages 0 and 3" in text
    assert "4 (2 a device)" in text


def test_waiting_is_what_a_simulation_shows() -> None:
    job = load_job(Path(EXAMPLE))
    profile = analytic(job, SHEETS["cpu"])
    plan = PlannedWorld(job, profile, limit_bytes(job, profile, None), 7, 1).start()
    simulated = dry_run_plan(plan, profile).bubble
    expected = sum(simulated.values()) / len(simulated)
    assert planned(EXAMPLE, "--nodes", "7").plan.bubble == pytest.approx(expected, abs=0.01)


# --------------------------------------------------------------------------- what it goes by


@pytest.mark.parametrize("device", ["a40", "A100", "h100", "h200", "cpu"])
def test_data_sheets(device: str) -> None:
    found = planned(EXAMPLE, "--nodes", "6", "--device", device)
    assert not found.measured
    assert found.plan.step_s > 0


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text('[device]\nlike = "h100"\ndispatch_s = 1e-3\nmemory_bytes = "40GiB"\n', encoding="utf-8")
    slow = planned(EXAMPLE, "--nodes", "6", "--device", str(file))
    fast = planned(EXAMPLE, "--nodes", "6", "--device", "h100")
    assert slow.plan.step_s > fast.plan.step_s
    assert slow.device == "slow"


def test_a_profile_as_json(tmp_path: Path, job_file: JobFile) -> None:
    file = tmp_path / "profile.json"
    file.write_bytes(msgspec.json.encode(even_profile(6)))
    found = planned(str(job_file("")), "--nodes", "4", "--profile", str(file))
    assert found.measured
    assert (found.num_layers, found.memory_bytes) == (6, 0)


def test_what_a_daemon_has_measured(tmp_path: Path, job_file: JobFile) -> None:
    path = job_file("")
    profile = msgspec.structs.replace(even_profile(5), device="cpu x86_64, 1 threads")
    key = profile_key(load_job(path), DeviceInfo("n/0", "cpu", "cpu", 0, "", "", 1))
    journal = Journal(tmp_path, step_of=lambda _entry: None, on_trouble=lambda _trouble: None)
    journal.append(
        [ProfileMeasured("other", Profile("k", "cpu", ())), ProfileMeasured(key, profile)]
    ).result()
    journal.close()
    file = str(tmp_path / "journal.sqlite")
    assert planned(str(path), "--nodes", "4", "--profile", file).num_layers == 5
    path.write_text(
        path.read_text(encoding="utf-8").replace("sequence = 8", "sequence = 9"), encoding="utf-8"
    )
    assert "none of its 2 profiles is of small's" in refused(str(path), "--nodes", "4", "--profile", file)


# --------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nodes", "0"), "--nodes"),
        ((), "--nodes is missing"),
        (("--nodes", "4", "--device", "h1000"), "no device 'h1000'"),
        (("--nodes", "4", "--device", "nowhere.toml"), "nowhere.toml: No such file"),
        (("--nodes", "4", "--device", EXAMPLE), "no [device] table"),
        (("--nodes", "4", "--profile", "nowhere.json"), "nowhere.json: No such file"),
        (("--nodes", "4", "--profile", EXAMPLE), "no profile"),
        (("--nodes", "4", "--without", "node-5"), "no node 'node-5'"),
        (("--nodes", "4", "--without", "rack"), "no node 'rack'"),
    ],
)
def test_wrong_words(words: tuple[str, ...], says: str) -> None:
    assert says in refused(EXAMPLE, *words)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("[model]\nfamily = 'bert'\n", "model.family: 'bert' has no analytic profile"),
        ("[model]\nconfig = { n_layer = 0 }\n", "model.config.n_layer: 0 is no whole number above 0"),
        ("[schedule]\nchunks = 2\n", "schedule.chunks: 2 needs a decoupled backward"),
        ("[schedule]\nchunks = 3\n", "schedule.chunks: "),
        (
            "[fault_tolerance]\npolicy = 'bamboo'\n[schedule]\nbackward = 'decoupled'\nchunks = 2\n",
            "schedule.chunks: 2 does not go with fault_tolerance.policy = 'bamboo'",
        ),
        ("[schedule]\nredundant_memory = 'much'\n", "schedule.redundant_memory: 'much' is no size"),
        ("[model]\nconfig = { n_head = 5 }\n", "model.config.n_head: 5 does not divide n_embd = 768"),
        ("[model]\nconfig = { attn_pdrop = 1 }\n", "model.config.attn_pdrop: 1 is not in [0, 1)"),
        ("[model]\ncheckpoint = '/nowhere'\n", "/nowhere/config.json: No such file"),
        ("[resources]\nlink = 'fast'\n", "resources.link: 'fast' is no bandwidth"),
        ("[modell]\n", "unknown key"),
    ],
)
def test_wrong_jobs(job_file: JobFile, table: str, says: str) -> None:
    assert says in refused(str(job_file(table)), "--nodes", "4")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[device]\nlike = 'z80'\n", "device.like: no device 'z80'"),
        ("[device]\nlike = 'h100'\nflops = 3\n", "flops: unknown key"),
        ("[device]\nlike = 'h100'\nmemory_bytes = 'much'\n", "'much' is no size"),
        ("[device]\nfp32_flops = 1e12\n", "is missing"),
        ("[device\n", "is no TOML"),
    ],
)
def test_wrong_tables(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "device.toml"
    file.write_text(text, encoding="utf-8")
    assert says in refused(EXAMPLE, "--nodes", "4", "--device", str(file))


def test_no_plan(job_file: JobFile) -> None:
    assert "1 usable node, and the model needs 2" in refused(EXAMPLE, "--nodes", "1", code=1)
    last = ("--without", "2", "--without", "3")
    assert "hint: add 1 or more nodes" in refused(EXAMPLE, "--nodes", "3", *last, code=1)
    small = str(job_file("[resources]\ndevice_memory = '1MiB'\n"))
    assert "raise resources.device_memory" in refused(small, "--nodes", "4", code=1)
    huge = str(job_file("[model]\nconfig = { n_embd = 49152, n_head = 1 }\n"))
    assert "a --device of more memory" in refused(huge, "--nodes", "4", "--device", "a40", code=1)


# --------------------------------------------------------------------------- recomputation


LLAMA_2_7B = (
    'name = "llama-2-7b"\n[model]\nfamily = "llama"\nconfig = { max_position_embeddings = 4096 }\n'
    "[train]\nsteps = 10\nglobal_batch = 128\nmicro_batch = 4\n"
    'sequence = 4096\nprecision = "bf16"\n[fault_tolerance]\nf = 0\n[resources]\nmax_nodes = 6\n'
)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    file = tmp_path / "llama.toml"
    file.write_text(LLAMA_2_7B, encoding="utf-8")
    return str(file)


def again(file: str) -> str:
    """What is said of it, for the golden text."""
    text = ctl(file, "--nodes", "4", "--device", "h100", "--set", "schedule.recompute=auto").stdout
    return text[text.index("RECOMPUTATION") : text.index("PIPELINE ")]


def test_stages_and_settings_are_compared(llama: str) -> None:
    assert again(llama) == GOLDEN_AGAIN.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("micro_batch", "none", "most"), [(4, 10, 6), (1, 4, 4)]
)  # at most 6, and fewer than 5
def test_llama_2_7b_on_few_devices_of_80_gb(llama: str, micro_batch: int, none: int, most: int) -> None:
    words = ("--nodes", str(most), "--device", "h100", "--set", f"train.micro_batch={micro_batch}")
    found = planned(llama, *words, "-v", "--set", "schedule.recompute=auto")
    by_name = {each.recompute: each for each in found.recomputations}
    assert by_name["none"].n0 == none
    assert by_name["auto"].n0 == by_name["blocks"].n0 == 3 <= most
    assert 0 < by_name["auto"].step_s <= min(by_name["blocks"].step_s, by_name["selective"].step_s)
    assert by_name["auto"].step_s == found.plan.step_s
    used = [stage for t in found.templates if t.instances for stage in t.stages]
    assert all(stage.needed_bytes[stage.recompute] == stage.memory_bytes <= 80e9 for stage in used)
    assert all(
        s.needed_bytes["blocks"] <= s.needed_bytes["selective"] <= s.needed_bytes["none"] for s in used
    )


def test_a_compiled_job_is_not_offered_the_selective_one(llama: str) -> None:
    found = planned(llama, "--nodes", "4", "--device", "h100", "-v", "--set", "train.compile=true",
                    "--set", "schedule.recompute=auto")  # fmt: skip
    assert [each.recompute for each in found.recomputations] == ["none", "blocks", "auto"]


def test_nothing_is_said_of_it_where_nobody_asks(llama: str) -> None:
    assert "RECOMPUTATION" not in ctl(EXAMPLE, "--nodes", "4").stdout
    text = ctl(EXAMPLE, "--nodes", "4", "-v").stdout
    assert "none (the job's)" in text
    assert planned(EXAMPLE, "--nodes", "4").recomputations == ()


def test_who_is_too_large_hears_of_it(llama: str) -> None:
    h100 = ("--device", "h100", "--set", "train.global_batch=12800")
    more = "plan for a --device of more memory"
    for nodes, micro_batch, expected in (
        (5, 4, f'add 5 or more nodes, or {more}, or set schedule.recompute = "auto" (3 are enough then)'),
        (2, 4, f'add 8 or more nodes, or {more}, or set schedule.recompute = "auto" (3 are enough then)'),
        (5, 16, f"(5 nodes are enough then, with 75,251,580,928 bytes of a device), {more}, or lower"),
        (5, 64, f'{more} (136,692,760,576 bytes with schedule.recompute = "auto"), or lower'),
    ):
        words = ("--nodes", str(nodes), "--set", f"train.micro_batch={micro_batch}")
        assert expected in refused(llama, *h100, *words, code=1)
    recomputing = ("--nodes", "2", "--set", "schedule.recompute=auto")
    assert "recompute" not in refused(llama, *h100, *recomputing, code=1)
    redundant = ("--set", "fault_tolerance.policy=bamboo", "--set", "train.global_batch=16")
    assert "(6 are enough then)" in refused(llama, *h100, "--nodes", "16", *redundant, code=1)


# --------------------------------------------------------------------------- what it loads


def loaded_by(code: str) -> frozenset[str]:
    script = (
        f"import sys\n{code}\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return frozenset(done.stderr.split())


def test_planning_loads_neither_torch_nor_sockets() -> None:
    code = f"from oobleckd.ctl.main import main; sys.argv = ['', 'plan', {EXAMPLE!r}, '--nodes', '3']\n"
    code += "try: main()\nexcept SystemExit as end: assert not end.code"
    assert loaded_by(code).isdisjoint({"torch", "transformers", "aiohttp", "zmq", "textual"})


def write() -> None:
    GOLDEN.write_text(golden(), encoding="utf-8")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "llama.toml"
        file.write_text(LLAMA_2_7B, encoding="utf-8")
        GOLDEN_AGAIN.write_text(again(str(file)), encoding="utf-8")


LLAMA_7B = (
    '[model]\nfamily = "llama"\n[train]\nsteps = 10\nglobal_batch = 512\nmicro_batch = 1\n'
    'sequence = 2048\nprecision = "bf16"\n'
)


def test_mfu_of_a_plan_by_hand(tmp_path: Path) -> None:
    """6 N + 12 L a s of a Llama-7B are 42.86 GFLOPs a token (``tests/unit/planner/test_flops.py``)."""
    file = tmp_path / "job.toml"
    file.write_text(f'name = "l7"\n{LLAMA_7B}')
    found = planned(str(file), "--nodes", "4", "--devices", "8", "--device", "h100")
    assert found.flops_per_token == 42_863_689_728
    assert found.peak_of == "NVIDIA H100 SXM, bf16"
    assert found.plan.mfu == pytest.approx(42_863_689_728 * found.plan.tokens_per_s / (32 * 989e12))
    assert f"MFU:       {found.plan.mfu:.1%} of NVIDIA H100 SXM, bf16" in ctl(
        str(file), "--nodes", "4", "--devices", "8", "--device", "h100"
    ).stdout  # fmt: skip
    assert all(loss.plan is None or 0 < loss.plan.mfu < 0.35 for loss in found.losses)


def test_of_a_mixture_a_plan_says_how_many_parameters_a_token_goes_through(tmp_path: Path) -> None:
    """Of Mixtral-8x7B four blocks."""
    file = tmp_path / "job.toml"
    file.write_text(
        'name = "m"\n[model]\nfamily = "mixtral"\nconfig = { num_hidden_layers = 4 }\n'
        "[train]\nsteps = 10\nglobal_batch = 8\nmicro_batch = 1\nsequence = 2048\n"
    )
    words = (str(file), "--nodes", "4", "--device", "h200")
    found = planned(*words)
    assert (found.params, found.active_params) == (6_067_228_672, 1_839_370_240)
    blocks = 4 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096 + 2 * 3 * 4096 * 14336)
    assert found.flops_per_token == 6 * (blocks + 4096 * 32000) + 12 * 4 * 4096 * 2048
    assert "model:  6.07 B parameters, 1.84 B active" in ctl(*words).stdout


def test_a_cpu_has_no_peak_and_a_sheet_of_ones_own_has(tmp_path: Path) -> None:
    found = planned(EXAMPLE, "--nodes", "7")
    assert (found.plan.mfu, found.peak_of) == (0.0, "")
    assert found.flops_per_token > 0
    own = tmp_path / "mine.toml"
    own.write_text('[device]\nlike = "a100"\nbf16_flops = 1e15\nfp32_flops = 2e14\n')
    assert planned(EXAMPLE, "--nodes", "7", "--device", str(own)).peak_of == "mine, fp32"


if __name__ == "__main__":
    write()
