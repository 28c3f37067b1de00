"""The status of the agent, for processes outside the job: `tierckpt watch`.

`activity` counts the agent's work, `server` answers watchers in the agent's process, and `client`
asks. A watcher has a socket of its own: the agent would take another connection for a trainer's,
and wait for it. No trainer takes part, and without a watcher the cost is a few counters.
"""
