"""oobleck-console."""
