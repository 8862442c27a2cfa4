"""Agents and device processes as forks of a process that has torch loaded."""
