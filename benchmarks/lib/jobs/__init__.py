"""Jobs of real processes that are killed, start again and resume: their ranks, launchers, logs."""
