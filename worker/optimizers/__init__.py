"""Optimizer rules: what each keeps of a parameter, and how it updates it (docs/optimizers.md)."""
