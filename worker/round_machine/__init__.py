"""A device's half of the commit protocol, pure: what happens goes in, what is to be done comes out. No torch,
no sockets, no clock: the worker, the tests' worlds, the simulator and the model check run the same code.
"""
