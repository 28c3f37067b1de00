"""`tierckpt run`: a shim between a launcher and a training script, which restarts the script within
a second.

Each rank's process imports torch and other modules, and forks the script's process, which so starts
in milliseconds. When the script of one rank fails, the shims of all ranks end theirs and fork the
next attempt. A shim holds no thread, no CUDA context and no communication of torch's when it forks.
The idea is that of a zygote (Android), and of restarts in place of the launcher's (NVIDIA's
Resiliency Extension).
"""
