"""Screens: which panels, and where."""
