"""Many versions, one after the other: `tierckpt.history`."""
