"""SCR-Exa's experiment: tables, and jobs of real processes that are killed and resume."""
