"""The simulator: the core machine, the policies and the planner as they are, on a virtual clock
(docs/simulator.md).
"""
