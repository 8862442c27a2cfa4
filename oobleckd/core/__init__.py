"""The pure machine: events in, commands out. No socket, clock, randomness or logging."""
