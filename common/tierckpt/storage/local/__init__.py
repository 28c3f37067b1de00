"""The node-local level: its folder and its files."""
