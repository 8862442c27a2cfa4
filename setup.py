"""What pyproject.toml cannot say yet: the C files of the worker, compiled where there is a C compiler.

They are called by ctypes, and so need no headers of Python. Where they cannot be compiled the installation
goes on without them, and torch does what they would, to the same bits (D-kernels-001).
"""

from setuptools import Extension, setup

SHARED = ["worker/runtime/cpu.h"]
"""What both include: they are compiled anew when it changes, and a source distribution has it."""

setup(
    ext_modules=[
        Extension(
            "oobleckd.worker.sums._kernels",
            sources=["worker/sums/kernels.c"],
            depends=SHARED,
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off"],
            optional=True,
        ),
        Extension(
            "oobleckd.worker.optimizers._update",
            sources=["worker/optimizers/update.c"],
            depends=SHARED,
            # A root that sets no errno is an instruction and not a call; its bits are the same.
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno"],
            libraries=["m"],
            optional=True,
        ),
    ]
)
