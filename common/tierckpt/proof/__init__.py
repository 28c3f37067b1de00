"""Proof: `tierckpt prove`, whether a script that is killed and started again goes on exactly.

A job of it runs with a `ProofOrder` (`coordination.proof_order`): its checkpoints go to a scratch
folder, each rank records the contents of every version (`recorder`, `records`), and the job ends,
or is killed, where the order says. `runs` starts such jobs, `verdict` compares the records, and
`coverage` says what they did not put to the test.
"""
