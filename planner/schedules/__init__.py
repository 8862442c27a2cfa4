"""Orders of ops on devices: searched, run dry, validated."""
