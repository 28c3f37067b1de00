"""What do checkpoints cost at 2 to 16,384 ranks? Simulated; and the simulator beside real figures.

    python benchmarks/scale.py --toy
    python benchmarks/scale.py --json scale.json --plot scale.png

docs/simulate.md explains the model. Nothing is measured here.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lib import machine
from lib.report import publish
from lib.scale import checks, measured, studies
from lib.scale.picture import plot
from lib.scale.steps import BALLOTS, steps
from lib.scale.studies import MEASURED, RANKS
from lib.terminal import parser_of, say

RESULTS = Path(__file__).resolve().parent / "results"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__, toy="two sizes, a month: some seconds")
    parser.add_argument("--days", type=float, help="simulated days; default 365, toy 30")
    parser.add_argument("--replicas", type=int, help="repetitions; default 5, toy 2")
    parser.add_argument("--plot", type=Path, help="draw the picture here (needs matplotlib)")
    options = parser.parse_args()
    options.days = options.days or (30.0 if options.toy else 365.0)
    options.replicas = options.replicas or (2 if options.toy else 5)
    options.ranks = (2, 1024) if options.toy else RANKS
    return options


def main() -> None:
    options = arguments()
    document: dict[str, Any] = {
        "simulated": True,
        "costs_from": MEASURED.name,
        "ballots_from": BALLOTS.name,
        "settings": {"days": options.days, "replicas": options.replicas, "toy": options.toy},
    }
    for name, study in (
        ("goodput", studies.goodput(options)),
        ("redundancy", studies.redundancy(options)),
        ("storm", studies.storm(options)),
        ("steps", steps(options)),
        ("lightcheck", checks.lightcheck_rows(options.toy)),
        ("others", checks.others(options.toy)),
        ("measured", _measured_rows()),
    ):
        document[name] = list(study)
    print("All of this is SIMULATED.")
    publish(options.json, machine.description(Path.cwd()), **document)
    if options.plot:
        say(plot(options.plot, document))


def _measured_rows() -> list[dict[str, Any]]:
    """Rows of goodput.py, measured and simulated."""
    return [
        {
            "file": path.name,
            "method": row.method,
            "mtbf_seconds": row.mtbf_seconds,
            "measured": row.measured,
            "simulated": row.simulated,
            "points": row.points,
            "resolution_points": row.resolution_points,
        }
        for path in sorted(RESULTS.glob("*goodput*.json"))
        for row in measured.rows(path)
    ]


if __name__ == "__main__":
    main()
