"""Heads that are computed otherwise than transformers computes them."""
