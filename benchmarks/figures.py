"""Checks that the figures of the pages are those of the results files, and measures them again.

    python benchmarks/figures.py                # check, as a test does
    python benchmarks/figures.py --write        # put the values of the files into the pages
    python benchmarks/figures.py --run          # measure all again, in an hour and a half
    python benchmarks/figures.py --run --quick  # in ten minutes, with fewer rounds and sizes

benchmarks/README.md explains the files in benchmarks/claims.
"""

from __future__ import annotations

import argparse
import sys

from lib.claims import check, measure
from lib.files import clean_up_when_terminated


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="correct the pages")
    parser.add_argument("--run", action="store_true", help="measure again, into build/figures")
    parser.add_argument("--quick", action="store_true", help="with --run: ten minutes at most")
    options = parser.parse_args()
    if options.quick and not options.run:
        parser.error("--quick is for --run: give both")
    if options.run:
        run(options.quick)
        return
    if options.write:
        print("\n".join(check.write()))
    wrong = False
    for report in check.reports():
        print(
            f"{report.page.path.relative_to(check.ROOT)}: {len(report.proved)} figures from "
            f"results files, {report.given} given"
        )
        for problem in report.problems:
            print(f"  {problem}")
        wrong = wrong or bool(report.problems)
    sys.exit(1 if wrong else 0)


def run(quick: bool) -> None:
    """Measure, and print the new figures below those of the pages."""
    clean_up_when_terminated()
    failed = measure.measure(quick)
    text = "\n".join(measure.comparison())
    (measure.FOLDER / "comparison.txt").write_text(text + "\n")
    print(f"\n{text}\n\nThe same text is in {measure.FOLDER}/comparison.txt, with all results.")
    for sentence in failed:
        print(sentence)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
