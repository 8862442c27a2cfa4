"""The boundary cache: keeps what a device sent to its neighbours in a round until the commit, so that it can
be sent once more.

When a stage dies, the stage before it still has the activations that it sent, and the stage behind it the
gradients that it sent back. With both at hand only the dead stage's own work is lost. Owns the memory, which
is bounded: what does not fit is not kept, and its micro-batch begins at the embedding again. On a GPU the
copies lie in pinned memory of the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from oobleckd.worker.round_machine.tasks import Task


@dataclass(slots=True)
class BoundaryCache:
    """Sent tensors by (kind of message, the task that made it): "F" activations, "B" their gradients, each of
    shape (batch, sequence, hidden). ``limit_bytes`` 0: nothing is kept.
    """

    limit_bytes: int
    held_bytes: int = 0
    _tensors: dict[tuple[str, Task], Tensor] = field(default_factory=dict)

    def put(self, kind: str, task: Task, tensor: Tensor) -> None:
        """Keep ``tensor``, which stays unchanged until the round is over, if there is room."""
        # Activations and gradients are both kept: with activations alone everything behind the dead stage
        # would be done again. That is twice the memory, hence the bound. (D-recovery-011)
        if self.held_bytes + tensor.nbytes > self.limit_bytes:
            return
        if tensor.device.type == "cuda":
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                tensor, non_blocking=True
            )
        self._tensors[kind, task] = tensor
        self.held_bytes += tensor.nbytes

    def has(self, kind: str, task: Task) -> bool:
        """Whether the message can be sent again."""
        return (kind, task) in self._tensors

    def get(self, kind: str, task: Task, device: torch.device) -> Tensor:
        """The tensor of the message, on ``device``. Raises KeyError unless ``has``; beside a GPU it waits."""
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # its copy to the host may still be on its way
        return self._tensors[kind, task].to(device)

    def clear(self) -> None:
        """Drop everything: the round is over."""
        self._tensors.clear()
        self.held_bytes = 0
