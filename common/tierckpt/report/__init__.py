"""The report of jobs as one HTML file: `tierckpt report`.

`sources` finds and reads what a job has left: versions, records of runs, events, traces, and the
cores in use. `page` draws that and writes the file. It needs no network, and changes nothing in a
job's folders.
"""
