"""What layers, stages and copies cost: time and memory, as numbers."""
