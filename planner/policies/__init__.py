"""Recovery policies over the planner's algorithms."""
