"""How one program of this package starts another: with the same Python, and with nothing in front of what is
installed.

``-P`` keeps the current directory off the module path: what lies in it under the name of a package of ours,
or of one that we import, is not ours to run.
"""

from __future__ import annotations

import sys

# Without it the current directory comes before all that is installed: a folder worker/ there stopped a
# local cluster. (D-service-015, D-service-016)
MODULE = ("-P", "-m")
"""The words between the interpreter and a module's name."""


def command(module: str, *words: str) -> tuple[str, ...]:
    """The command line of ``module``, a program of this package, with ``words`` as its arguments."""
    return (sys.executable, *MODULE, module, *words)
