"""Every method on the digits data, each with its best of 12 settings: ``python -m benchmarks.digits``.

Task: 1797 images of 8 x 8 pixels over 50 clients, Dirichlet(0.1) by label, at least 5 samples each, of which a client
keeps 20 % for testing; an MLP 64-100-10; 100 rounds of 10 clients, one local epoch in batches of 20, plain SGD.

Protocol: every method gets 12 cells, four learning rates times three values of its one main knob, other settings at
their defaults, and the same three seeds. The rates are four neighbours on one ladder; methods that mix much of an older
direction into each local step (MoFedSAM, FedVSSAM) stand higher on it. A seed decides partition, initial model, cohorts
and batch orders, the same for all methods. A fifth of every client's training part is held back; the cell with the best
accuracy on it (unweighted mean over clients, mean over seeds, last round) is the method's, and its scores on the
clients' test parts are reported (last round, mean and sample standard deviation over seeds). Ranges too were set by
validation accuracy alone, so that the best cells lie inside of them where that can be.

Runs go through the real Strategies and client halves on ``InProcessGrid``. Every finished run is written to the results
at once, so that an interrupted benchmark goes on where it stopped. Results depend neither on the number of workers nor
on the order; a run takes some 4 s of one core.
"""

import argparse
import importlib.metadata
import json
import logging
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fedstrat
from benchmarks.selection import Knob, Method, choose, markdown

RESULTS = Path(__file__).parent / "results" / "digits.json"
PACKAGES = ("flwr", "torch", "numpy", "scikit-learn")
SCORES = ("mean", "best10", "worst10", "std", "accuracy", "loss")

SETTING: dict[str, Any] = {
    "num-server-rounds": 100,
    "num-clients": 50,
    "fraction-train": 0.2,
    "dataset.name": "digits",
    "dataset.partition": "dirichlet",
    "dataset.alpha": 0.1,
    "dataset.min-size": 5,
    "dataset.test-fraction": 0.2,
    "model.name": "mlp",
    "model.hidden": "100",
    "train.batch-size": 20,
    "train.local-epochs": 1,
    "train.device": "cpu",
}
SEEDS = (1, 2, 3)
LADDER = (0.04, 0.1, 0.3, 0.8, 2.0, 5.0)
LOW, MIDDLE, HIGH = LADDER[:4], LADDER[1:5], LADDER[2:]
BY_EXAMPLES = {"scaffold.weighting": "examples"}
METHODS = (
    Method("FedAvg", "fedavg", "server-lr", (1.0, 2.0, 4.0), LOW),
    Method("FedAvgM", "fedavgm", "momentum", (0.7, 0.8, 0.9), MIDDLE),
    Method("FedProx", "fedprox", "mu", (0.01, 0.1, 1.0), MIDDLE),
    Method("SCAFFOLD", "scaffold", "server-lr", (1.0, 2.0, 4.0), LOW),
    Method("SCAFFOLD, weighted by examples", "scaffold", "server-lr", (1.0, 2.0, 4.0), LOW, BY_EXAMPLES),
    Method("ConFIG", "config", "length", ("projection", "raw", "mean_norm"), MIDDLE),
    Method("CRAFT", "craft", "server-lr", (0.1, 0.3, 1.0), MIDDLE),
    Method("FedSAM", "fedsam", "rho", (0.02, 0.05, 0.2), MIDDLE),
    Method("MoFedSAM", "mofedsam", "alpha", (0.05, 0.1, 0.3), HIGH),
    Method("FedVSSAM", "fedvssam", "gamma-l", (0.1, 0.4, 0.7), HIGH),
    Method("FedNova", "fednova", "server-lr", (1.0, 2.0, 4.0), LOW),
    Method("q-FedAvg", "qfedavg", "q", (0.1, 0.5, 1.0), MIDDLE),
    Method("AFL", "afl", "lambda-lr", (0.01, 0.1, 0.5), MIDDLE),
    Method("FedMGDA+", "fedmgdaplus", "server-lr", (0.1, 0.3, 1.0), MIDDLE),
    Method("FedFV", "fedfv", "alpha", (0.1, 0.3, 0.5), MIDDLE),
    Method("FedLF", "fedlf", "server-lr", (0.5, 1.0, 2.0), MIDDLE),
    Method("FedGAMMA", "fedgamma", "server-lr", (1.0, 2.0, 4.0), LOW),
    Method("FedSMOO", "fedsmoo", "lamb", (0.01, 0.1, 0.5), MIDDLE),
    Method("FedACG", "fedacg", "momentum", (0.5, 0.7, 0.85), MIDDLE),
    Method("MOON", "moon", "mu", (0.1, 1.0, 5.0), MIDDLE),
    Method("FedNTD", "fedntd", "beta", (0.1, 0.3, 1.0), MIDDLE),
    Method("FedSPU", "fedspu", "ratios", ("0.5", "0.8", "0.2,0.4,0.6,0.8,1.0"), MIDDLE),
    Method("Normalised FedAvgM", "normalisedfedavgm", "server-lr", (0.03, 0.1, 0.3), MIDDLE),
)

CAPTION = f"""\
1797 images over 50 clients, Dirichlet(0.1) by label, at least 5 samples and 20 % test data each; an MLP 64-100-10, 100
rounds of 10 clients, one local epoch, batch 20. Every method has 12 cells: four neighbouring learning rates of
{", ".join(f"{lr:g}" for lr in LADDER)}, times three values of its one knob. A fifth of every client's training data,
held back, chose the cell. Test accuracy over clients after the last round, mean ± standard deviation of {len(SEEDS)}
seeds (std: over clients); \\* marks a chosen value at an end of its range. MB are the payloads of all training
messages of a run, both ways; seconds are CPU time of a whole run of the chosen cell, all methods measured one after
another by `--time`. The last column averages all 12 cells, those that
diverge included. Made by `python -m benchmarks.digits`; every run is in [digits.json](benchmarks/results/digits.json).
"""

Run = tuple[Method, float, Knob, int]


def all_runs() -> list[Run]:
    """Every run of the benchmark, seed by seed, so that a part of it already compares all methods."""
    return [(m, lr, value, seed) for seed in SEEDS for m in METHODS for lr in m.lrs for value in m.values]


def run_config(method: Method, lr: float, value: Knob, seed: int) -> dict[str, Any]:
    """The run config of one run."""
    own = {"algorithm": method.algorithm, f"{method.algorithm}.{method.knob}": value, **method.fixed}
    return {**SETTING, "seed": seed, "train.lr": lr, **own}


def make(run: Run) -> dict[str, Any]:
    """Make one run; called in a worker process."""
    import torch  # noqa: PLC0415  # workers alone need it

    from benchmarks.held_out import measure  # noqa: PLC0415

    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    begun = time.process_time()
    scores, sent, problem = measure(run_config(*run))
    method, lr, value, seed = run
    record: dict[str, Any] = {"method": method.label, "lr": lr, "value": value, "seed": seed}
    for part, fairness in scores.items():
        numbers = {name: getattr(fairness, name) for name in SCORES}
        record[part] = {n: round(v, 6) if math.isfinite(v) else None for n, v in numbers.items()}
    record |= {"mb": round(sent / 1e6, 3), "cpu_seconds": round(time.process_time() - begun, 2)}
    return record | ({"problem": problem} if problem else {})


def header() -> dict[str, Any]:
    """What decides the results, and what they were made with."""
    grid = {
        m.label: {"algorithm": m.algorithm, "lrs": list(m.lrs), "knob": m.knob, "values": list(m.values), **m.fixed}
        for m in METHODS
    }
    return {
        "command": "python -m benchmarks.digits",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": f"CPU only, one core a run, of {os.cpu_count()} cores ({platform.machine()})",
        "versions": {
            "fedstrat": fedstrat.__version__,
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in PACKAGES},
        },
        "setting": SETTING,
        "seeds": list(SEEDS),
        "methods": grid,
    }


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one run from another."""
    return record["method"], record["lr"], record["value"], record["seed"]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the finished runs of an earlier start that are part of the grid, or leave if they aren't comparable."""
    if not path.exists():
        return []
    old, new = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(header()))
    for part in (old, new):
        part["methods"] = {
            label: {name: value for name, value in grid.items() if name not in ("lrs", "values")}
            for label, grid in part["methods"].items()
        }
    known = old["methods"].keys() & new["methods"].keys()
    for name in ("setting", "versions"):
        if old[name] != new[name]:
            sys.exit(f"{path} was made with other {name} ({old[name]}); --fresh begins anew and overwrites it")
    if changed := sorted(label for label in known if old["methods"][label] != new["methods"][label]):
        sys.exit(f"{path} was made with other settings of {', '.join(changed)}; --fresh begins anew and overwrites it")
    return [record for record in old["runs"] if key(record) in places()]


def read_seconds(path: Path) -> dict[str, float]:
    """What ``--time`` measured before."""
    return dict(json.loads(path.read_text(encoding="utf-8")).get("cpu_seconds", {})) if path.exists() else {}


def places() -> dict[tuple[Any, ...], int]:
    """Where every run stands in the results."""
    return {(m.label, lr, value, seed): i for i, (m, lr, value, seed) in enumerate(all_runs())}


def write(path: Path, runs: list[dict[str, Any]], seconds: Mapping[str, float]) -> None:
    """Write results and table; a run is one line, in the order of the grid whatever the order of finishing."""
    place = places()
    runs.sort(key=lambda record: place[key(record)])
    rows = {m: choose(m, SEEDS, runs) for m in METHODS}
    chosen = {
        m.label: {"lr": row.lr, m.knob: row.value, "validation": row.validation, "test": row.test, "grid": row.grid}
        for m, row in rows.items()
        if row is not None
    }
    head = json.dumps({**header(), "chosen": chosen, "cpu_seconds": seconds}, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(record)}" for record in runs)
    _replace(path, f'{head},\n "runs": [\n{lines}\n ]\n}}\n')
    _replace(path.with_suffix(".md"), f"{CAPTION}\n{markdown(rows, seconds)}")


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def main() -> None:
    """Make the runs that are missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.digits", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time, a core each (default 1)")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON file; a table is written beside it")
    parser.add_argument("--time", action="store_true", help="measure one run of every chosen cell again")
    options = parser.parse_args()
    seconds = {} if options.fresh else read_seconds(options.results)
    runs = [] if options.fresh else read(options.results)
    done = {key(record) for record in runs}
    missing = [run for run in all_runs() if (run[0].label, *run[1:]) not in done]
    print(f"{len(done)} runs are finished, {len(missing)} are missing", flush=True)
    # Fresh processes: a fork of one that has used torch's threads may hang.
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for record in pool.imap_unordered(make, missing):
            runs.append(record)
            write(options.results, runs, seconds)
            what = f"{record['method']}, lr {record['lr']:g}, {record['value']}, seed {record['seed']}"
            accuracy = f"validation {record['validation']['mean']:.3f}, {record['cpu_seconds']} s"
            print(f"{len(runs)}/{len(all_runs())}  {what}: {accuracy}", flush=True)
    if options.time:
        cells = [(m, row.lr, row.value, SEEDS[0]) for m in METHODS if (row := choose(m, SEEDS, runs))]
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.map(make, cells[:1])  # imports, and the data set
            seconds = {run[0].label: pool.map(make, [run])[0]["cpu_seconds"] for run in cells}
    write(options.results, runs, seconds)
    print(options.results.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
