"""The device process: its loop, its executor, and what it says of itself."""
