"""A device's part in checkpoints: when, of which copy, and who writes."""
