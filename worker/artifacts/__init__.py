"""Artifacts of compiled layers: on disk, and on their way between devices, agents and the daemon."""
