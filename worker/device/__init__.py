"""The device process: its loop, the job that it has, and what it says of itself."""
