"""One round: a try at a step, from its tasks through the reduced gradients to the commit and the update."""
