"""The wire: messages over ZeroMQ, structs of the HTTP API, job.toml, and their codecs.

A leaf: imports nothing of the project but the planner's vocabulary. No sockets, no clock.
"""
