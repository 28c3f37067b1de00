"""A stand-in for a rank under horovodrun: it requests a fork, and exits with the status of that.

horovodrun starts it with the path of the socket of elastic_job.py. It imports nothing but the
standard library, so it starts within a few hundredths of a second.
"""

import json
import os
import socket
import sys


def main() -> int:
    door = socket.socket(socket.AF_UNIX)
    door.connect(sys.argv[1])
    with door, door.makefile("rw") as stream:
        stream.write(json.dumps(dict(os.environ)) + "\n")
        stream.flush()
        # The line comes at the end of the rank. If this process is killed, so is the rank.
        return int(stream.readline() or 1)


if __name__ == "__main__":
    sys.exit(main())
