"""What do checkpoints cost at 2 to 16,384 ranks? Simulated; and the simulator beside real figures.

    python benchmarks/scale.py --toy
    python benchmarks/scale.py --json scale.json --plot scale.png

docs/simulate.md explains the model. Nothing is measured here, except the CPU time of the simulator.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from lib import machine
from lib.files import write_json
from lib.report import align
from lib.scale import checks, measured, studies
from lib.scale.jobs import MEASURED, RANKS, WAYS
from lib.scale.picture import plot
from lib.scale.steps import BALLOTS, STEP_WAYS, steps
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
        **machine.description(Path.cwd()),
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
        if options.json:
            write_json(options.json, document)
    print("\nAll of this is SIMULATED.")
    for text in tables(document):
        print(f"\n{text}")
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
            "simulated_at_reference_pace": row.simulated_at_reference,
            "pace": row.pace,
            "points": row.points,
            "resolution_points": row.resolution_points,
        }
        for path in sorted(RESULTS.glob("*goodput*.json"))
        for row in measured.rows(path)
    ]


def tables(document: dict[str, Any]) -> list[str]:
    """All tables, each with a title."""
    return [
        *(_goodput_table(document["goodput"], factor) for factor in (1.0, 10.0)),
        _redundancy_table(document["redundancy"]),
        _storm_table(document["storm"]),
        _steps_table(document["steps"]),
        _checks_table(document),
    ]


def _goodput_table(rows: list[dict[str, Any]], factor: float) -> str:
    rows = [row for row in rows if row["rate_factor"] == factor]
    lines: list[tuple[str, ...]] = [("ranks", "failures a day", *WAYS)]
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        own = [row for row in rows if row["ranks"] == ranks]
        cells = (f"{100 * r['goodput']:.2f} ± {100 * r['goodput_error']:.2f} %" for r in own)
        lines.append((f"{ranks:,}", f"{own[-1]['failures_per_day']:.3g}", *cells))
    return f"goodput, failures x {factor:g}\n{align(lines)}"


def _redundancy_table(rows: list[dict[str, Any]]) -> str:
    lines: list[tuple[str, ...]] = [
        ("scheme", "losses in ten years", "chance of one", "accelerated: formula", "simulated")
    ]
    for row in rows:
        fast = row["accelerated"]
        cells = (f"{row['losses_in_ten_years']:.2g}", f"{row['probability_of_one']:.2g}")
        lines.append((row["scheme"], *cells, f"{fast['formula']:.3g}", str(fast["simulated"])))
    return f"losses beyond the redundancy, {rows[0]['ranks']:,} ranks\n{align(lines)}"


def _storm_table(rows: list[dict[str, Any]]) -> str:
    titles = {
        "each_ranks": "each rank reads",
        "each_nodes": "each node reads",
        "each_shards": "read once",
        "peer": "peer",
        "local": "local",
        "memory": "memory",
    }
    lines: list[tuple[str, ...]] = [("ranks", *titles.values())]
    for row in rows:
        lines.append((f"{row['ranks']:,}", *(f"{row[name]:.3g} s" for name in titles)))
    return f"until all ranks have the state again\n{align(lines)}"


def _steps_table(rows: list[dict[str, Any]]) -> str:
    lines: list[tuple[str, ...]] = [
        ("ranks", *(f"{way}, ms" for way in STEP_WAYS.values()), *STEP_WAYS.values())
    ]
    for row in rows:
        times = (f"{1e3 * row[f'{name}_seconds']:.2f}" for name in STEP_WAYS)
        packets = (f"{row[f'{name}_packets']:.0f}" for name in STEP_WAYS)
        lines.append((f"{row['ranks']:,}", *times, *packets))
    return f"a ballot; and packets of the busiest node, calculated\n{align(lines)}"


def _checks_table(document: dict[str, Any]) -> str:
    points = document["lightcheck"]
    off = [100 * abs(p["simulated_hours"] / p["published_hours"] - 1) for p in points]
    near = [abs(row["points"]) for row in document["measured"]]
    bias = math.fsum(row["points"] for row in document["measured"]) / len(near)
    lines = [
        f"LightCheck 5a and 5b: {len(points)} points, the farthest is off by {max(off):.2f} %",
        f"goodput.py: {sum(n <= 3 for n in near)} of {len(near)} rows within 3 points, the "
        f"farthest {max(near):.1f}, on average {bias:+.1f}",
    ]
    for row in document["others"]:
        error = "" if row["error"] is None else f" ± {row['error']:.3g}"
        text = f"{row['figure']}: published {row['published']:g}, "
        lines.append(f"{text}simulated {row['simulated']:.4g}{error}")
    return "checks\n" + "\n".join(lines)


if __name__ == "__main__":
    main()
