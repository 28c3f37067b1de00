"""Copies: each rank's journal also on another node, so that it survives the loss of its node.

| module | content |
|---|---|
| `listener` | the port at which a rank waits for its ward |
| `small_state_link` | the one thing that travels: the small state of each record, over TCP |
| `journal_copies` | one rank's part: the copy that it keeps, and what the keeper of its own needs |
"""
