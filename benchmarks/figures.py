"""Checks that the figures of the pages are those of the results files, and measures them again.

    python benchmarks/figures.py                # check, as a test does
    python benchmarks/figures.py --list         # figures of each page, and those without a file
    python benchmarks/figures.py --write        # put the values of the files into the pages
    python benchmarks/figures.py --run          # measure all again, in an hour and a half
    python benchmarks/figures.py --run --quick  # in ten minutes, with fewer rounds and sizes

benchmarks/README.md explains the files in benchmarks/claims.
"""

from __future__ import annotations

import argparse

from lib.claims import check


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.write:
        for change in check.write():
            print(change)
    for report in check.reports():
        print(
            f"{report.page.path.relative_to(check.ROOT)}: {len(report.proved)} figures proved, "
            f"{report.unproved} without a results file, {report.given} given, {len(report.problems)} problems"
        )
        for problem in report.problems:
            print(f"  {problem}")


if __name__ == "__main__":
    main()
