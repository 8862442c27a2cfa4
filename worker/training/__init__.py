"""The rounds of one job on one device: what the round machine commands is done here."""
