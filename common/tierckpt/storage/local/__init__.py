"""Local: the node-local level, its folder and its files."""
