"""Stands in for a rank where a launcher wants to start one: asks for a fork, and ends as it ends.

Started by horovodrun with the path of elastic.py's socket. Needs nothing but Python itself, so it
is there in a few hundredths of a second.
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
        return int(stream.readline() or 1)  # when the rank has ended; whoever kills us kills it


if __name__ == "__main__":
    sys.exit(main())
