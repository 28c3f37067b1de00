"""Import of other tools' checkpoints as versions, and export of versions to them."""
