"""The agent of a node: it computes nothing, imports no torch, and starts, watches and ends the device
processes.
"""
