"""Checkpoints without the job that made them: what there is (`survey`, `catalog`), whether it is
sound (`verify`), and its tensors (`saved`).
"""
