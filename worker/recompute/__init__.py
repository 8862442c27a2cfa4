"""Blocks whose activations are not held from the forward to the backward, but computed again there."""
