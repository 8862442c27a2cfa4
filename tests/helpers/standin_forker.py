"""A forker of stand-in devices: the real one, without torch."""

from __future__ import annotations

from tests.helpers import standin_device
from worker.fork import forker


def main() -> None:
    """The program."""
    forker.main(lambda: None, standin_device.main, "tests.helpers.standin_device")


if __name__ == "__main__":
    main()
