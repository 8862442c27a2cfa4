"""Chaos on a real cluster: random failures by seed, or the whole kill matrix; every run compared bit by bit.

What ``python benchmarks/chaos.py`` can be told:

    --seeds 50                        50 seeds from 0 on
    --seed 17                         one seed again
    --hows hang,sigstop               only these kinds of failures
    --devices 2                       only on nodes of two devices (else every fourth seed)
    --matrix [--cell N]               every phase x victim x one or two at once
    --matrix --every                  the same in every manner of training, some 2,100 cells
    --matrix --devices-per-stage 2    another matrix, of stages of so many devices (2, 4); without --matrix
                                      seeds of jobs that have them
    --manner oobleck-fused-staggered  only so (else as the seed or the cell has it)
    --policies oobleck,slipstream     only cells, or seeds, that are theirs
    --points --seeds 30               deaths inside a backup, a validation and a copy, in all manners in turn
    --torn 20                         a writer killed in the middle of a checkpoint file, 20 times
    --daemon --seeds 20               kill -9 of the daemon in the middle of training
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers.launch import endable
from oobleckd.protocol.job import PolicyName
from tests.helpers.chaos import HOWS, daemon_seed, random_seed
from tests.helpers.cluster import Cluster
from tests.helpers.manners import BY_NAME, manner_of
from tests.helpers.matrix import NODES as MATRIX_NODES
from tests.helpers.matrix import Cell, all_cells, eval_cells, every_cell, on_all_data, precopy_cells, run_cell
from tests.helpers.points import manner_of_points, point_seed
from tests.helpers.sharedmatrix import EACH, SharedCell, run_shared_cell, shared_cells
from tests.helpers.sharedmatrix import NUM_NODES as SHARED_NODES
from tests.helpers.torn import manner_of_torn, torn_seed

AnyCell = TypeVar("AnyCell", Cell, SharedCell)
NODES = 5
TWO_DEVICE_NODES = 3
TWO_DEVICES_EVERY = 4  # seeds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds; 0: until it is stopped")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument("--cell", help="this cell of the matrix only")
    parser.add_argument("--every", action="store_true", help="with --matrix: in every manner, not in turn")
    parser.add_argument("--hows", default=",".join(HOWS), help="kinds of failures to draw from, with commas")
    parser.add_argument(
        "--devices", type=int, choices=(1, 2), help="of every node (default: 2 in every fourth run)"
    )
    parser.add_argument("--devices-per-stage", type=int, choices=EACH, help="of the jobs, and of every node")
    parser.add_argument("--daemon", action="store_true", help="kill the daemon instead of nodes")
    parser.add_argument(
        "--with-node", action="store_true", help="with --daemon: a node dies while it is away"
    )
    parser.add_argument(
        "--points", action="store_true", help="deaths at the points of an update and of a copy"
    )
    parser.add_argument(
        "--torn", type=int, default=0, help="so many kills in the middle of a checkpoint file"
    )
    parser.add_argument("--manner", choices=sorted(BY_NAME), help="of the jobs")
    parser.add_argument("--policies", default=",".join(get_args(PolicyName)), help="of the jobs, with commas")
    args = parser.parse_args()
    args.policies = args.policies.split(",")
    if args.devices_per_stage and (args.daemon or args.points or args.torn or args.devices or args.every):
        parser.error("--devices-per-stage goes with --seeds and --matrix")
    if unknown := set(args.policies) - set(get_args(PolicyName)):
        parser.error(
            f"--policies: no policy {', '.join(sorted(unknown))}; there are {', '.join(get_args(PolicyName))}"
        )
    with tempfile.TemporaryDirectory(prefix="oobleck-chaos-") as state, contextlib.ExitStack() as stack:
        clusters = Clusters(Path(state), stack)
        failed, total = (matrix if args.matrix else seeds)(clusters, args)
    print(f"{total - failed} of {total} bit-identical")
    return 1 if failed else 0


class Clusters:
    """The clusters that a run needs, each started when it is first asked for; ``stack`` ends them."""

    def __init__(self, state: Path, stack: contextlib.ExitStack) -> None:
        self._state, self._stack = state, stack
        self._running: dict[tuple[int, int], Cluster] = {}

    def of(self, nodes: int, devices: int = 1, *, spare: bool = False) -> Cluster:
        """The cluster of so many nodes with so many devices each."""
        if (nodes, devices) not in self._running:
            folder = self._state / f"{nodes}x{devices}"
            folder.mkdir()
            cluster = self._stack.enter_context(Cluster(folder, nodes, devices=devices, spare=spare))
            self._running[nodes, devices] = cluster
        return self._running[nodes, devices]

    def of_stages(self, each: int) -> Cluster:
        """The cluster for stages of ``each`` devices."""
        return self.of(SHARED_NODES, each, spare=True)

    def for_seed(self, seed: int, devices: int | None) -> Cluster:
        """``devices`` None: the seed says it."""
        two = seed % TWO_DEVICES_EVERY == TWO_DEVICES_EVERY - 1 if devices is None else devices == 2
        return self.of(TWO_DEVICE_NODES, 2) if two else self.of(NODES)


def matrix(clusters: Clusters, args: argparse.Namespace) -> tuple[int, int]:
    """All cells, or one."""
    if args.devices_per_stage:
        return shared_matrix(clusters.of_stages(args.devices_per_stage), args)
    cluster = clusters.of(MATRIX_NODES)
    everything = [*every_cell(), *precopy_cells(), *eval_cells()]
    cells = everything if args.every else all_cells()
    if args.cell:
        cells = [each for cell in everything for each in on_all_data(cell) if each.name == args.cell]
    cells = [cell for cell in cells if args.manner in {None, cell.manner.name}]
    cells = [cell for cell in cells if cell.manner.policy in args.policies]
    return carried_out(cluster, cells, run_cell, "")


def shared_matrix(cluster: Cluster, args: argparse.Namespace) -> tuple[int, int]:
    """All cells of stages of so many devices, or one."""
    cells = shared_cells(args.devices_per_stage)
    cells = [cell for cell in cells if args.cell in {None, cell.name}]
    cells = [cell for cell in cells if args.manner in {None, cell.manner.name}]
    cells = [cell for cell in cells if cell.manner.policy in args.policies]
    return carried_out(cluster, cells, run_shared_cell, f" --devices-per-stage {args.devices_per_stage}")


def carried_out(
    cluster: Cluster, cells: Sequence[AnyCell], run: Callable[[Cluster, AnyCell], object], flags: str
) -> tuple[int, int]:
    """Each of ``cells``, one after the other; a cluster in which one fails makes room for another."""
    failed = 0
    for cell in cells:
        began = time.monotonic()
        try:
            cluster.heal()
            run(cluster, cell)
            print(f"{cell.name}: identical, {time.monotonic() - began:.1f} s", flush=True)
        except AssertionError as error:
            failed += 1
            print(
                f"{cell.name}: FAILED {error}\n  again: python benchmarks/chaos.py --matrix{flags} --cell "
                f"{cell.name}",
                flush=True,
            )
            cluster.restart()
    return failed, len(cells)


def seeds(clusters: Clusters, args: argparse.Namespace) -> tuple[int, int]:
    """Seeds one after the other."""
    failed = total = 0
    flags = (" --daemon" if args.daemon else "") + (" --with-node" if args.with_node else "")
    flags += " --points" if args.points else ""
    flags += " --torn 1" if args.torn else ""
    flags += f" --devices {args.devices}" if args.devices else ""
    flags += f" --devices-per-stage {args.devices_per_stage}" if args.devices_per_stage else ""
    flags += f" --manner {args.manner}" if args.manner else ""
    flags += "" if args.hows == ",".join(HOWS) else f" --hows {args.hows}"
    last = args.torn or args.seeds or sys.maxsize
    for seed in [args.seed] if args.seed is not None else range(last):
        drawn = (manner_of_points if args.points else manner_of_torn if args.torn else manner_of)(seed)
        manner = BY_NAME[args.manner] if args.manner else drawn
        if manner.policy not in args.policies:
            continue
        total += 1
        devices = 1 if args.torn else args.devices
        each = args.devices_per_stage or 1
        cluster = (
            clusters.of_stages(each)
            if each > 1
            else clusters.of(MATRIX_NODES)
            if args.points
            else clusters.for_seed(seed, devices)
        )
        try:
            if args.points:
                story = point_seed(cluster, seed, manner)
            elif args.torn:
                story = torn_seed(cluster, seed, manner)
            elif args.daemon:
                story = daemon_seed(cluster, seed, with_node=args.with_node, manner=manner)
            else:
                story = random_seed(cluster, seed, args.hows.split(","), manner, each)
            print(f"seed {seed}: identical ({manner.name}; {story})", flush=True)
        except AssertionError as error:
            failed += 1
            print(
                f"seed {seed}: FAILED {error}\n  again: python benchmarks/chaos.py{flags} --seed {seed}",
                flush=True,
            )
            cluster.restart()
    return failed, total


if __name__ == "__main__":
    sys.exit(endable(main))
