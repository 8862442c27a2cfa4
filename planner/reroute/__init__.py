"""Routes around dead devices."""
