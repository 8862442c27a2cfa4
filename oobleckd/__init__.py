"""oobleckd: training of large models that keeps going when machines die."""

__version__ = "0.1.0"
