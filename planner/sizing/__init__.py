"""How many pipelines of which sizes a number of nodes makes."""
