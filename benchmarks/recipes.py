"""The small recipes, one after another, and what they gave: ``python -m benchmarks.recipes --data DIR [NAME ...]``.

Each recipe is run by ``fedstrat compare --engine in-process``, so an interrupted benchmark goes on where it stopped;
its table and its single runs are then copied to ``benchmarks/results/recipes/NAME.md`` and ``NAME.csv``.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "recipes"


def keep(folder: Path, name: str) -> None:
    """Copy the table and the runs of a comparison to where they are committed."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "table.md", RESULTS / f"{name}.md")
    shutil.copyfile(folder / "runs.csv", RESULTS / f"{name}.csv")


def main() -> None:
    small = sorted(path.stem for path in (ROOT / "recipes").glob("*-small.toml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes, without .toml; all small ones by default")
    parser.add_argument("--data", required=True, help="folder that holds the data sets by name")
    parser.add_argument("--out", default="results", type=Path, help="folder of the comparisons")
    parser.add_argument("--options", default="", help="further options of fedstrat compare, for one recipe")
    parser.add_argument("--as", dest="name", help="name of the kept tables, where options change what is run")
    arguments = parser.parse_args()
    names = arguments.names or small
    if bool(arguments.options) != bool(arguments.name) or (arguments.name and len(names) > 1):
        parser.error("--options and --as come together and with one recipe")
    failed = []
    for name in names:
        folder = arguments.out / (arguments.name or name)
        command = [sys.executable, "-m", "fedstrat.cli", "compare", str(ROOT / "recipes" / f"{name}.toml")]
        command += ["--engine", "in-process", "--data", arguments.data, "--out", str(folder)]
        command += shlex.split(arguments.options)
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
        else:
            keep(folder, arguments.name or name)
    if failed:
        sys.exit(f"no whole table of {', '.join(failed)}; what was wrong stands above")


if __name__ == "__main__":
    main()
