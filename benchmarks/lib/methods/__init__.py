"""Ways to take checkpoints, behind one interface: ours and the alternatives."""
