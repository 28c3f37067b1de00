"""Goodput: the time of a job over all its runs, by category.

`heartbeat` writes the records of one rank among its events. `records` reads the files, `ranks`
groups them into runs of the job. `spans` divides the training of one run, `account` the whole job.
`document` is its form as JSON, `tables` that for people, `advice` names what would help.

The categories and the three goodputs are those of Google's ML Productivity Goodput (A. Wongpanich
et al., 2025) and of its library ML Goodput Measurement.
"""
