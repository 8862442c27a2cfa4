"""Which node takes which place, and who copies what to whom."""
