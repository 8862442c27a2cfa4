"""Pipeline templates: a model's layers split over a number of nodes."""
