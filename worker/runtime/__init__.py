"""What every room of the worker stands on: errors, frames, life lines, clocks. Knows nothing of training."""
