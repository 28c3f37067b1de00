"""Doctor: facts of a machine, its software and its settings that checkpoints depend on, with cures.

`examination.examine` runs the checks of all modules and returns findings; `cli.doctor` draws them.
A check is independent of all others: an error in it is a finding. The checks of directories and
memory are those of `storage.health`, which `tierckpt health` and jobs use before a start.
"""
