"""How much a rule of an installed package keeps of parameters of some shapes:
``python -m oobleckd.worker.tools.slots``.

Loads the rule, as every node does, and prints bytes as JSON. Owns no rule of its own
(``oobleckd.worker.optimizers``).
"""

from __future__ import annotations

import sys

import click
import msgspec

from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.worker.optimizers.plan import slots_of
from oobleckd.worker.runtime.errors import UserError


@click.command()
@click.option("--optimizer", required=True, help="The table [optimizer], as JSON.")
@click.option("--shapes", required=True, help="A list of shapes, as JSON.")
def main(optimizer: str, shapes: str) -> None:
    """Print the bytes that the optimizer keeps of a parameter of each shape."""
    table = msgspec.json.decode(optimizer, type=Optimizer)
    asked = msgspec.json.decode(shapes, type=list[tuple[int, ...]])
    try:
        found = slots_of(table, asked)
    except UserError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(1)
    bf16 = table.state == "bf16"
    print(msgspec.json.encode([sum(slot.num_bytes(bf16=bf16) for slot in kept) for kept in found]).decode())


if __name__ == "__main__":
    main()
