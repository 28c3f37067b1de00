"""Many versions, one after the other: `tierckpt.history`, and pictures of how weights evolve."""
