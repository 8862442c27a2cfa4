"""The program of a node: the agent, and one device process per device. torch lives here only."""
