"""The training state that a device holds, in memory, on the host and in files."""
