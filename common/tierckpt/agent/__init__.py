"""Agent: the node's agent process, and the trainer's connection to it. No torch."""
