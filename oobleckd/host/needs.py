"""What the programs of a cluster take of the limits that a machine sets: open files, tasks, memory in
/dev/shm, locked memory.

A leaf for programs that cannot begin without, for ``up`` and for ``doctor``. Each number is one of the code
that it names, and tests hold them to it, or was counted in a cluster that trained.
"""

from __future__ import annotations

import os

import msgspec

# oobleckd.daemon.accepting: MAX_EACH; oobleckd.daemon.halfopen: RESERVE; oobleckd.daemon.spares: NUM_SPARES.
USER_CONNECTIONS, RESERVE, SPARE_FILES = 64, 64, 8
DAEMON_FILES = 39  # counted: journal, past, sockets, ZeroMQ, links of the planner's processes
NODE_FILES = 1  # its connection (oobleckd.daemon.hub)

AGENT_FILES = 30  # counted: ZeroMQ, the loop, the forker, its log
# oobleckd.worker.processes.children: NUM_TIES, and a pidfd each of Child and of Forked.
CHILD_FILES = 4 + 2
MORE_CHILDREN = 2  # the spare, and an heir while its device is buried

DEVICE_FILES = 12  # counted: ties, listeners, the text, its log
# A socket and an eventfd of the outgoing link, a socket of the incoming one (oobleckd.worker.transport).
PEER_FILES = 3
STRANGERS = 64  # oobleckd.worker.transport.transport: _MAX_STRANGERS
CUDA_FILES = 64  # assumed: device files and pipes of CUDA and NCCL

DAEMON_TASKS = 8  # counted: main, ZeroMQ, the loop's own, journal, past
PLANNER_TASKS = 2 + 1  # two processes (oobleckd.daemon.planning), and who forks them
NODE_TASKS = 4 + 1  # the agent (main, two of ZeroMQ, children-watch), and its forker
CHILD_TASKS = 1  # the agent's thread at a child's life line
DEVICE_TASKS = 5  # counted, with the writer of checkpoints
PEER_TASKS = 2  # a thread for each direction (oobleckd.worker.transport)
CUDA_TASKS = 8  # assumed: CUDA, NCCL and autograd
SPARE_TASKS = 1

# What NCCL makes in /dev/shm for a connection of two processes of a host: the size in its own message
# "Error while creating shared memory segment /dev/shm/nccl-… (size 9637888)".
NCCL_SHARED_BYTES = 9_637_888
# NCCL_BUFFSIZE, for both directions of a connection: what a network card's driver locks of the host's memory.
NCCL_LOCKED_BYTES = 2 * (4 << 20)


class ClusterSize(msgspec.Struct, frozen=True):
    """How many nodes and devices there are, and how many of them on this machine. ``daemon``: whether it is
    here as well.
    """

    nodes: int = 1
    devices: int = 1
    nodes_here: int = 1
    devices_here: int = 1
    kind: str = "cpu"
    daemon: bool = True

    @property
    def _cuda(self) -> bool:
        return self.kind == "cuda"

    def files(self, *, least: bool = False) -> int:
        """Open files of the program that has the most of them; ``least``: without those that are for others
        (users, strangers), or only for a moment.
        """
        more = 0 if least else 1
        agent = agent_files(self._each) + more * CHILD_FILES * (MORE_CHILDREN - 1)
        device = DEVICE_FILES + PEER_FILES * (self.devices - 1) + CUDA_FILES * self._cuda + more * STRANGERS
        daemon = DAEMON_FILES + NODE_FILES * self.nodes + more * (USER_CONNECTIONS + RESERVE + SPARE_FILES)
        return max(agent, device, daemon if self.daemon else 0)

    def tasks(self) -> int:
        """Threads of all programs on this machine, as the kernel counts tasks."""
        device = DEVICE_TASKS + PEER_TASKS * (self.devices - 1) + CUDA_TASKS * self._cuda + CHILD_TASKS
        # asyncio.to_thread's pool (concurrent.futures) has as many at most.
        daemon = DAEMON_TASKS + PLANNER_TASKS + min(32, (os.cpu_count() or 1) + 4)
        nodes = self.nodes_here * (NODE_TASKS + SPARE_TASKS + CHILD_TASKS)
        return nodes + self.devices_here * device + (daemon if self.daemon else 0)

    def shared_bytes(self) -> int:
        """What is put into /dev/shm."""
        pairs = self.devices_here * (self.devices_here - 1) if self._cuda else 0
        return pairs * NCCL_SHARED_BYTES

    def locked_bytes(self) -> int:
        """What one process locks of the host's memory, where it has a network card for RDMA."""
        return NCCL_LOCKED_BYTES * (self.devices - self.devices_here) if self._cuda else 0

    @property
    def _each(self) -> int:
        """Devices of a node of this machine."""
        return -(-self.devices_here // max(1, self.nodes_here))


def agent_files(devices: int) -> int:
    """Open files of an agent of so many devices and a spare."""
    return AGENT_FILES + CHILD_FILES * (devices + 1)


def devices_for(files: int, kind: str) -> int:
    """Of how many devices a job can be where a process may have so many files open."""
    own = DEVICE_FILES + STRANGERS + CUDA_FILES * (kind == "cuda")
    return max(0, (files - own) // PEER_FILES + 1)


def nodes_for(files: int) -> int:
    """How many nodes a daemon can have that may have so many files open."""
    return max(0, (files - DAEMON_FILES - USER_CONNECTIONS - RESERVE - SPARE_FILES) // NODE_FILES)
