"""What an engine takes for everything but the steps themselves, in seconds and bytes a second.

Owns the numbers: those of our own engine, as measured, and of the published systems. What a step, a copy over
the links and a mended round take follows from the profile (``steps``). Every number can be replaced by a TOML
file of such names.

No number of seconds below is from a paper. Of the published systems only the mechanism is taken: what is done
again, what stops, what moves. Each number in their presets is an assumption, named as one and with why it is
so large, and so is every comparison that depends on it: try others with ``--costs FILE``.

Not checked, since the papers were not at hand when this was written: the numbers of sections (which follow
the planner's modules); whether a paper states a time to detect, pause or restart after all, which should then
stand here; how much longer Bamboo's steps are (assumed: a tenth) for a given model; how often Varuna writes
(assumed: every 10 steps); and whether SlipStream's authors count the interrupted iteration as lost (assumed:
yes).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from oobleckd.host import anyfile
from oobleckd.protocol.unreadable import problem_of

_Seconds = Annotated[float, Meta(ge=0)]
_Rate = Annotated[float, Meta(gt=0)]
_HOW = "see docs/simulator.md"


class CostsError(ValueError):
    """Costs that cannot be used: what, where, and a hint."""

    def __init__(self, problem: str, hint: str = _HOW) -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one engine.

    ``detect_s``: from a death to the daemon's notice. ``silence_s``: the same where no peer has a link to the
    dead, so that only its silence tells. ``report_s``: from the notice until all survivors have answered and
    the decision is made. ``plan_s``: what the policy takes for a plan, ``plan_node_s`` for every node on top.
    ``deploy_s``: of a new layout all but its copies; ``init_s`` of the first one. ``restart_s``: on top where
    every process begins anew because the job rolls back to a checkpoint, ``load_bytes_per_s`` what a node
    then reads. ``start_s``: from a node's arrival until its devices can be used. ``snapshot_bytes_per_s``:
    how fast a device copies what it is to write, while training waits; ``write_bytes_per_s`` how fast a node
    writes it, while training goes on. ``manifest_s``: to complete a checkpoint. ``keeps``: what a loss leaves
    of the step under way: everything but the dead devices' own work, or nothing. ``every``: steps between
    checkpoints (0: as the job has it). ``longer``: the share by which every step is longer than the timeline
    says; ``commit_s``: by which time, whatever the plan (tensor messages, votes, the way to the next step);
    ``sums_bytes_per_s``: how fast a device sends what it exchanges of gradients with other holders of its
    layers, while it waits, on top of what the plan has of that (``resources.link``). ``begin_s``: of a
    deployment where the process of a device has just started: its model and data are opened, links are made;
    less what it was told to do before the stop. ``precopy``: copies are made while training goes on, where
    that pays.
    """

    detect_s: _Seconds = 0.003
    silence_s: _Seconds = 1.0
    report_s: _Seconds = 0.003
    plan_s: _Seconds = 0.05
    plan_node_s: _Seconds = 50e-6
    deploy_s: _Seconds = 0.1
    init_s: _Seconds = 1.0
    restart_s: _Seconds = 0.0
    load_bytes_per_s: _Rate = 1e9
    start_s: _Seconds = 6.0
    snapshot_bytes_per_s: _Rate = 10e9
    write_bytes_per_s: _Rate = 1e9
    manifest_s: _Seconds = 0.01
    keeps: Literal["hops", "nothing"] = "hops"
    every: Annotated[int, Meta(ge=0)] = 0
    longer: _Seconds = 0.0
    commit_s: _Seconds = 0.0
    sums_bytes_per_s: _Rate = inf
    begin_s: _Seconds = 0.0
    precopy: bool = True


# Ours. Measured: from a loss to the decision 2 to 3 ms (`benchmarks/recovery.py`, a process killed;
# CHANGELOG.md), which is detect_s and report_s together, so
# each of them is on the safe side. silence_s: the lease of a quiet node (docs/mechanisms/detection.md).
# start_s: a device process from nothing until its
# Hello, nearly all of it the import of torch. plan_s, plan_node_s: the policies in the pool's process on 8 to
# 1,024 nodes (`benchmarks/planner.py`; plans that
# are searched for an order take longer, docs/simulator.md).
# Assumed: deploy_s, since on one machine a deployment that copies nothing is a few messages between two
# steps, and on many hosts connections are made; init_s,
# which is paid once; load and write at 1 GB/s a node, a local NVMe disk or a share of a common one; the copy
# for a checkpoint at 10 GB/s, a GPU's way to
# its host; manifest_s, a small file.
# commit_s, sums_bytes_per_s: nothing, as plans have it, so that both say the same of a step. Where the job
# says its link, both have what of the exchange does not hide under the backward (planner/costs/exchange.py);
# where it does not, both are near the truth on fast links alone. begin_s is in deploy_s.
OURS = Costs()

# Ours on one machine of two cores, where each device is a process (`benchmarks/simulated.py`, in whose
# journals these stand). deploy_s: 4 to 5 ms from the decision to a
# layout in force where nothing is copied and nobody is new. begin_s: 0.16 s of one process that was just
# forked. init_s, restart_s: 0.14 s from a way
# back to the layout in force, with weights made anew or 20 MB a device loaded. plan_s: 4 to 5 ms. detect_s:
# the daemon's loop shares the cores with the devices. Its commit_s and
# sums_bytes_per_s depend on how many devices share them: the benchmark measures both.
ONE_MACHINE = msgspec.structs.replace(
    OURS, detect_s=0.012, plan_s=0.005, deploy_s=0.005, begin_s=0.16, init_s=0.12, restart_s=0.12
)

# The published systems. What several of them have in common, assumed:
# - 1 s until somebody notices: a failure shows as a socket that is closed or a collective that ends with an
# error, and a second is the shortest time-out that
#   people set by hand (torchft with time-outs of 1 s goes on after 1.1 to 1.5 s, measured on one machine:
# benchmarks/README.md has the set-up).
# - 30 s until a node that comes can be used: its processes start, import and make their communicators, where
# ours is a torch import (6 s).
# - 10 s to make process groups anew: those of all survivors are torn down and made again. There torchft is
# full again after 8 to 14 s.

# Oobleck, SOSP'23. Section 5 (dynamic reconfiguration): training stops, pipelines are instantiated from
# templates, missing layers are copied from
# replicas, and the interrupted iteration is done again. The copies are modelled as ours.
OOBLECK = Costs(detect_s=1.0, report_s=0.0, deploy_s=10.0, start_s=30.0, keeps="nothing", precopy=False)

# Varuna, EuroSys'22. Sections 4.3 and 5 (job morphing): on a change of the cluster the job is restarted from
# its last checkpoint in the best P x D. Assumed:
# 5 s of missed heartbeats of a manager outside the job; 60 s to start all processes, six times what torchrun
# takes to restart four small processes on one
# machine (10 s), for more hosts, a larger model and its communicators; a checkpoint every 10 steps, which is
# a minute or so where a step takes some seconds.
VARUNA = Costs(
    detect_s=5.0, report_s=0.0, deploy_s=0.0, restart_s=60.0, start_s=60.0, keeps="nothing", every=10
)

# Bamboo, NSDI'23. Sections 4 and 5: the predecessor takes over in a short pause, and reconfigurations bring
# in spares. Assumed: 1 s of pause, to run the redundant
# backward passes; 30 s to reconfigure, since unlike the others every device moves two stages; steps a tenth
# longer, as the redundant forward does not always
# fit into the bubbles, besides what its deeper pipelines cost, which is modelled.
BAMBOO = Costs(detect_s=1.0, report_s=1.0, deploy_s=30.0, start_s=30.0, longer=0.1, precopy=False)

# SlipStream, arXiv 2405.14009 version 1 (ReCycle in SOSP'24). Section 4: work of the dead is re-routed from
# the next iteration on, no parameters move. Assumed:
# the interrupted iteration is done again; 10 s for a node that comes, whose groups are made anew.
SLIPSTREAM = Costs(detect_s=1.0, report_s=0.0, deploy_s=10.0, start_s=30.0, keeps="nothing", precopy=False)

PRESETS: dict[str, Costs] = {
    "ours": OURS,
    "one-machine": ONE_MACHINE,
    "silent": msgspec.structs.replace(OURS, detect_s=OURS.silence_s),  # hosts that vanish, and close no link
    "oobleck-as-published": OOBLECK,
    "varuna-as-published": VARUNA,
    "bamboo-as-published": BAMBOO,
    "slipstream-as-published": SLIPSTREAM,
}
"""By the names that ``--costs`` knows. ``as-published``: of each policy its own."""

AS_PUBLISHED = "as-published"


def costs_named(name: str, policy: str) -> Costs:
    """The costs that ``name`` means for ``policy``: a preset, or a TOML file whose ``like`` names the preset
    that it changes.

    Raises CostsError.
    """
    key = f"{policy}-{AS_PUBLISHED}" if name == AS_PUBLISHED else name
    if key in PRESETS:
        return PRESETS[key]
    if name == AS_PUBLISHED:
        return OURS  # nobody has published it
    path = Path(name).expanduser()
    if path.suffix != ".toml" and not path.exists():
        known = ", ".join([*PRESETS, AS_PUBLISHED])
        raise CostsError(f"no costs {name!r}", f"known are {known}, or name a TOML file")
    try:
        raw = anyfile.toml(path)
    except OSError as error:
        raise CostsError(f"{path}: {error.strerror}") from error
    except anyfile.FileError as error:
        raise CostsError(f"{path}: {error}", error.hint) from error
    return _changed(path, raw)


def _changed(path: Path, raw: Mapping[str, Any]) -> Costs:
    given = dict(raw)
    like = given.pop("like", "ours")
    if like not in PRESETS:
        raise CostsError(f"{path}: like: no costs {like!r}", f"known are {', '.join(PRESETS)}")
    try:
        return msgspec.convert(msgspec.to_builtins(PRESETS[like]) | given, Costs)
    except msgspec.ValidationError as error:
        names = ", ".join(Costs.__struct_fields__)
        if "beforehand" in raw:
            raise CostsError(f"{path}: unknown key beforehand", "it has a new name: write precopy") from error
        told = problem_of(error, Costs, msgspec.to_builtins(PRESETS[like]) | given)
        raise CostsError(f"{path}: {told}", f"its keys are like, {names}") from error
