"""Tensor messages between device processes, by sockets."""
