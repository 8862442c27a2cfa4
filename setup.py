"""What pyproject.toml cannot say yet: the C file of the worker, compiled where there is a C compiler.

It is called by ctypes, and so needs no headers of Python. Where it cannot be compiled the installation goes
on without it, and sums are added up by torch, to the same bits (D-kernels-001).
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "oobleckd.worker.sums._kernels",
            sources=["worker/sums/kernels.c"],
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off"],
            optional=True,
        )
    ]
)
