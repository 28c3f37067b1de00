"""The history of jobs: records of runs, forks, parts of other jobs' versions, `tierckpt log`."""
