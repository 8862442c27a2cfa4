"""What devices send each other: keyed tensor messages, and what is added up as it comes in."""
