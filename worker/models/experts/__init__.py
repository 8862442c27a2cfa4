"""Experts of a mixture: how they compute."""
