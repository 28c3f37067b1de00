"""Checkpointing mechanisms for DLIO, the program behind MLPerf Storage's workloads."""
