"""Checkpoints without the job that made them: what there is (`survey`, `catalog`), whether it is
sound (`soundness`), and its tensors (`saved`).
"""
