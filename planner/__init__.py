"""The planner: numbers in, plans out. Pure: no torch, no I/O, no clock, no randomness."""
