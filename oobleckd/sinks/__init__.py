"""Sinks: what is committed, written where people look: TensorBoard, W&B, CSV, JSON lines; and what follows
events.
"""
