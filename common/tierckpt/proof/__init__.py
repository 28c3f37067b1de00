"""`tierckpt prove`: whether a script that is killed and started again goes on exactly.

A run of it is a job with an `order`: its checkpoints go to a scratch folder (`order`), each rank
records what every version is made of (`recorder`, `records`), and it ends, or is killed, where the
order says. `runs` starts such jobs, and `verdict` compares what they recorded.
"""
