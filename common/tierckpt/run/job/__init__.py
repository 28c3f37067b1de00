"""The shims of one job: how they find each other, what they decide together, and where the scripts
of each attempt meet."""
