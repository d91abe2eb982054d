"""``make bench``, or ``python -m benchmarks.performance [--quick] [--fluke PYTHON] [--write]``.

Prints a table of CPU times and ratios against the goals and against the last committed result. ``--write`` makes the
result of this run that one.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fedstrat
from benchmarks.performance import clients, memory, on_ray, server
from benchmarks.performance.problems import quiet
from benchmarks.performance.timing import Row

RESULTS = Path(__file__).parents[1] / "results" / "performance.json"
PACKAGES = ("flwr", "torch", "numpy")


def fluke_round_ms(python: str | None) -> float | None:
    """CPU milliseconds of a SCAFFOLD round of fluke, where an interpreter that has it is given."""
    if python is None:
        return None
    script = Path(__file__).with_name("fluke_scaffold.py")
    done = subprocess.run([python, str(script)], capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def rows(*, quick: bool, fluke: str | None) -> Iterator[Row]:
    yield from server.wire(quick=quick)
    yield from server.packs(quick=quick)
    yield from clients.everything(quick=quick, fluke_ms=fluke_round_ms(fluke))
    yield from server.aggregation(quick=quick)
    yield from memory.memory(quick=quick)
    if not quick:
        yield from on_ray.rows()
        yield from server.large()


def header() -> dict[str, Any]:
    """What the results were made with."""
    return {
        "command": "make bench",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": f"{os.cpu_count()} cores ({platform.machine()}), one thread, CPU only",
        "load": round(os.getloadavg()[0], 1),
        "versions": {
            "fedstrat": fedstrat.__version__,
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in PACKAGES},
        },
    }


def line(row: Row, before: dict[str, float]) -> str:
    goal = "" if row.goal is None else f"{row.goal:g}x {'met' if row.ratio >= row.goal else 'MISSED'}"
    last = f"{before[key(row)]:.2f}x" if key(row) in before else "new"
    times = f"{row.ours:9.1f} {row.theirs:9.1f} {row.unit}"
    return f"{row.name:70} {times}  {row.ratio:6.2f}x  {goal:12} last {last:8} against {row.against}"


def key(row: Row) -> str:
    return f"{row.name} | {row.against}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes: a minute or two")
    parser.add_argument("--fluke", metavar="PYTHON", help="an interpreter that has fluke-fl, to compare with")
    parser.add_argument("--write", action="store_true", help=f"keep this run's result in {RESULTS.name}")
    chosen = parser.parse_args()
    quiet()
    before = {}
    if RESULTS.exists():
        kept = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
        before = {f"{row['name']} | {row['against']}": row["theirs"] / row["ours"] for row in kept}
    measured: list[dict[str, Any]] = []
    for row in rows(quick=chosen.quick, fluke=chosen.fluke):
        print(line(row, before), flush=True)
        measured.append({**asdict(row), "ratio": round(row.ratio, 3)})
        if chosen.write:  # after every row, so that an interrupted run leaves what it has
            RESULTS.write_text(json.dumps({**header(), "rows": measured}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
