"""What the numbers of NVIDIA's driver for errors of a card (XIDs) mean, in a few words, and how bad each is.

After NVIDIA's "Xid Errors" (docs.nvidia.com/deploy/xid-errors). Where its advice begins with the program, or
with nothing, it is a warning; where the card has to be reset, or looked after, it is an error. So is a number
that is not known here: a newer driver has more of them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class XidMeaning(NamedTuple):
    """``text`` for people; ``level`` as of a change."""

    text: str
    level: Literal["warn", "error"] = "error"


UNKNOWN = XidMeaning("not in our list; NVIDIA's has more")
_KNOWN = {
    8: XidMeaning("the card stopped processing", "warn"),
    11: XidMeaning("invalid or corrupted command stream", "warn"),
    13: XidMeaning("exception of the graphics engine, mostly the program's fault", "warn"),
    31: XidMeaning("memory page fault, mostly the program's fault", "warn"),
    32: XidMeaning("invalid or corrupted command stream", "warn"),
    38: XidMeaning("error of the driver's firmware"),
    43: XidMeaning("a program's work was ended after an error of its own", "warn"),
    44: XidMeaning("fault of the graphics engine at a context switch"),
    45: XidMeaning("a program's work was ended, after other errors or at its end", "warn"),
    46: XidMeaning("the card stopped processing"),
    48: XidMeaning("double-bit memory error (ECC)"),
    54: XidMeaning("auxiliary power is not connected"),
    61: XidMeaning("warning of an internal micro-controller"),
    62: XidMeaning("an internal micro-controller halted"),
    63: XidMeaning("a bad row or page of memory was replaced", "warn"),
    64: XidMeaning("a bad row or page of memory could not be replaced"),
    68: XidMeaning("exception of the video decoder", "warn"),
    69: XidMeaning("class error of the graphics engine", "warn"),
    74: XidMeaning("NVLink error"),
    79: XidMeaning("the card has fallen off the bus"),
    92: XidMeaning("many single-bit memory errors (ECC)"),
    94: XidMeaning("contained memory error (ECC): it hit one program", "warn"),
    95: XidMeaning("uncontained memory error (ECC): it may have hit any program"),
    109: XidMeaning("a context switch took too long"),
    110: XidMeaning("security fault"),
    119: XidMeaning("the card's system processor (GSP) did not answer"),
    120: XidMeaning("error of the card's system processor (GSP)"),
    121: XidMeaning("corrected error of the link between chips (C2C)", "warn"),
    140: XidMeaning("memory error (ECC) that could not be recovered from"),
    143: XidMeaning("the card could not be initialized"),
    **{number: XidMeaning("NVLink error") for number in range(144, 151)},
    154: XidMeaning("another recovery is needed than before (reset or restart)"),
}


def meaning(xid: int) -> XidMeaning:
    """What ``xid`` means."""
    return _KNOWN.get(xid, UNKNOWN)
