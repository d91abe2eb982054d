"""FedCSPACK's bytes against its accuracy on MNIST: ``python -m benchmarks.fedcspack --data DIR``.

Task: 70 000 images of 28 x 28 pixels over 20 clients, Dirichlet(0.3) by label, of which a client keeps 20 % for
testing; the built-in CNN (44 426 parameters); 100 rounds of 6 clients, one local epoch in batches of 32, plain SGD with
learning rate 0.05. A seed decides partition, initial model, cohorts and batch orders, the same for all rows.

Packs hold 256 parameters (174 packs), since the default of 1024 leaves so small a model 44. All other settings are the
defaults; none was tuned. Scores after 30 and after 100 rounds of the same run are unweighted means over the clients,
each on its own test part: of the global model, and of the personal models (what a client had after it last trained; the
global model where it never did). ``elsewhere`` is the same personal models on samples of the other clients' test parts,
asked for after the last round. Bytes are the payloads of training messages until then, up and down apart.

"One pack" is the end of the scale: no pack is ever below the threshold, nothing travels after a client's first round,
and every client trains alone from the same initial model.

Runs go through the real Strategies and client halves on ``InProcessGrid``. Every finished run is written to the results
at once, so that an interrupted benchmark goes on where it stopped.
"""

import argparse
import importlib.metadata
import json
import logging
import math
import os
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

import fedstrat
from client_app.app import app
from fedstrat.metrics.rounds import RoundReport
from fedstrat.models import trainable_names
from fedstrat.runs import config
from fedstrat.runs.model import initial_model
from fedstrat.simulation import InProcessGrid

RESULTS = Path(__file__).parent / "results" / "fedcspack.json"
LOWEST_DRAWN = 0.85
PACKAGES = ("flwr", "torch", "numpy")
SETTING: dict[str, Any] = {
    "num-server-rounds": 100,
    "num-clients": 20,
    "fraction-train": 0.3,
    "evaluate-personal": True,
    "dataset.name": "mnist",
    "dataset.partition": "dirichlet",
    "dataset.alpha": 0.3,
    "dataset.min-size": 10,
    "dataset.test-fraction": 0.2,
    "model.name": "cnn",
    "train.lr": 0.05,
    "train.batch-size": 32,
    "train.local-epochs": 1,
    "train.device": "cpu",
}
SEEDS = (1, 2, 3)
ROUNDS = (30, 100)
EVALUATE_EVERY = 10
SCORES = ("global", "global_worst", "personal", "personal_worst", "elsewhere")
BYTES = ("up_mb", "down_mb", "share")
# Half the width of a 95 % interval of a mean of n values, in standard errors: Student's t with n - 1 degrees.
STUDENT = {2: 12.706, 3: 4.303}


def packs(downlink: str, keep: float = 0.0, pack_size: int = 256, **more: Any) -> dict[str, Any]:
    """The run config of FedCSPACK with one downlink; ``keep`` 0 sends all candidates."""
    own = {"pack-size": pack_size, "downlink": downlink, "keep-ratio": keep, **more}
    return {"algorithm": "fedcspack", **{f"fedcspack.{name.replace('_', '-')}": value for name, value in own.items()}}


SAVING = {"initial_model": "seed", "pack_dtype": "bfloat16"}
ROWS: dict[str, dict[str, Any]] = {
    "FedAvg": {"algorithm": "fedavg"},
    "FedCSPACK dense, all candidates": packs("dense"),
    "FedCSPACK synced, all candidates": packs("synced"),
    "FedCSPACK synced, 10 %": packs("synced", 0.1),
    "FedCSPACK synced, 5 %": packs("synced", 0.05),
    "FedCSPACK mask, all candidates": packs("mask"),
    "FedCSPACK mask, 10 %": packs("mask", 0.1),
    "FedCSPACK mask, 5 %": packs("mask", 0.05),
    "One pack: every client alone": packs("synced", pack_size=10**6),
    "FedCSPACK synced, 5 %, packs of 64": packs("synced", 0.05, 64),
    "FedCSPACK synced, 1 %, packs of 64": packs("synced", 0.01, 64),
    "… 5 %, packs of 64, seed, bfloat16": packs("synced", 0.05, 64, **SAVING),
    "… 2 %, packs of 64, seed, bfloat16": packs("synced", 0.02, 64, **SAVING),
    "… 1 %, packs of 64, seed, bfloat16": packs("synced", 0.01, 64, **SAVING),
    "… 2 %, packs of 64, seed, bfloat16, error feedback": packs("synced", 0.02, 64, **SAVING, error_feedback=True),
    "… 1 %, packs of 64, seed, bfloat16, error feedback": packs("synced", 0.01, 64, **SAVING, error_feedback=True),
}


def make(label: str, seed: int, data: str) -> dict[str, Any]:
    """Make one run."""
    run = config.parse({**SETTING, **ROWS[label], "seed": seed, "dataset.dir": data})
    model = initial_model(run.flat)
    reports: list[RoundReport] = []
    begun = time.process_time()
    run.strategy(trainable=trainable_names(model)).start(
        grid=InProcessGrid(app, run.num_clients, run_config=run.flat),
        initial_arrays=fedstrat.to_arrays(model),
        num_rounds=run.num_server_rounds,
        evaluate_every=EVALUATE_EVERY,
        on_round=reports.append,
    )
    if any(r.failed for r in reports):
        raise RuntimeError(f"{label}, seed {seed}: a reply failed")
    curve = [point(reports[:done]) for done in range(EVALUATE_EVERY, len(reports) + 1, EVALUATE_EVERY)]
    return {"row": label, "seed": seed, "cpu_seconds": round(time.process_time() - begun, 1), "curve": curve}


def point(reports: list[RoundReport]) -> dict[str, float | None]:
    """Scores after the last of these rounds, and bytes of all of them."""
    last = reports[-1]
    if last.fairness is None or last.personal is None:
        raise RuntimeError(f"round {last.round} wasn't evaluated")
    up = sum(r.traffic.train_up_payload for r in reports)
    down = sum(r.traffic.train_down_payload for r in reports)
    return {
        "round": last.round,
        "global": round(last.fairness.mean, 5),
        "global_worst": round(last.fairness.worst, 5),
        "personal": round(last.personal.mean, 5),
        "personal_worst": round(last.personal.worst, 5),
        "elsewhere": round(last.elsewhere.mean, 5) if last.elsewhere else None,
        "up_mb": round(up / 1e6, 3),
        "down_mb": round(down / 1e6, 3),
        "share": round((up + down) / sum(r.traffic.train_dense_payload for r in reports), 5),
    }


def header() -> dict[str, Any]:
    """What decides the results, and what they were made with."""
    return {
        "command": "python -m benchmarks.fedcspack --data DIR",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": f"CPU only, one core, of {os.cpu_count()} cores ({platform.machine()})",
        "versions": {
            "fedstrat": fedstrat.__version__,
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in PACKAGES},
        },
        "setting": SETTING,
        "rows": ROWS,
    }


def write(path: Path, runs: list[dict[str, Any]]) -> None:
    """Write results and table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    order = list(ROWS)
    runs.sort(key=lambda r: (r["seed"], order.index(r["row"])))
    head = json.dumps(header(), indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    path.write_text(f'{head},\n "runs": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(runs), encoding="utf-8")
    draw(path.with_suffix(".png"), runs)


def markdown(runs: list[dict[str, Any]]) -> str:
    """The tables: means over the seeds that a row has, with 95 % intervals of the means."""
    lines = [
        "MNIST, CNN of 44 426 parameters, 20 clients, Dirichlet(0.3), 6 a round, packs of 256 where nothing else is",
        "said. Accuracies are means over the clients, and the worst client's; ± is the 95 % interval of the mean over",
        "the seeds.",
    ]
    for rounds in ROUNDS:
        scores_told = SCORES if rounds == ROUNDS[-1] else SCORES[:-1]
        names = " | ".join("its worst" if name.endswith("worst") else name for name in scores_told)
        lines += [
            "",
            f"After {rounds} rounds:",
            "",
            f"| method | seeds | {names} | MB up | MB down | of FedAvg |",
            f"|---|--:|{'---|' * len(scores_told)}--:|--:|--:|",
        ]
        for label in ROWS:
            own = [p for run in runs if run["row"] == label for p in run["curve"] if p["round"] == rounds]
            if own:
                scores = " | ".join(_interval([p[name] for p in own]) for name in scores_told)
                up, down, share = (statistics.fmean(p[name] for p in own) for name in BYTES)
                lines.append(
                    f"| {label} | {len(own)} | {scores} | {up:.1f} | {down:.1f} | {100 * share:.{share < 0.1:d}f} % |"
                )
    return "\n".join(lines) + "\n"


def _interval(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    if len(known) not in STUDENT:
        return f"{statistics.fmean(known):.3f}"
    half = STUDENT[len(known)] * statistics.stdev(known) / math.sqrt(len(known))
    return f"{statistics.fmean(known):.3f} ± {half:.3f}"


FAMILIES = {"FedAvg": "black", "dense": "tab:gray", "mask": "tab:orange", "synced": "tab:blue", "…": "tab:green"}


def draw(path: Path, runs: list[dict[str, Any]]) -> None:
    """The frontier: bytes both ways against the personal and the global models' accuracy, a picture a number of rounds.

    Error bars are the smallest and the largest seed. Rows far below are left out of the picture, not of the table.
    """
    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415  # after the choice of a backend without a window
    from matplotlib.ticker import NullFormatter  # noqa: PLC0415

    figure, axes = plt.subplots(len(ROUNDS), 2, figsize=(11, 4.2 * len(ROUNDS)), layout="constrained", squeeze=False)
    for line, rounds in zip(axes, ROUNDS, strict=True):
        for ax, score in zip(line, ("personal", "global"), strict=True):
            for number, label in enumerate(ROWS, start=1):
                own = [p for run in runs if run["row"] == label for p in run["curve"] if p["round"] == rounds]
                values = [p[score] for p in own]
                if not own or min(values) < LOWEST_DRAWN:
                    continue
                mean, megabytes = statistics.fmean(values), statistics.fmean(p["up_mb"] + p["down_mb"] for p in own)
                colour = next(c for family, c in FAMILIES.items() if family in label)
                spread = [[mean - min(values)], [max(values) - mean]]
                ax.errorbar(megabytes, mean, spread, fmt="o", color=colour, capsize=2, label=f"{number}  {label}")
                ax.annotate(str(number), (megabytes, mean), xytext=(5, 4), textcoords="offset points", fontsize=8)
            ax.set(
                xscale="log",
                xlim=(3, 300),
                xlabel="MB, both ways",
                ylabel=f"{score} accuracy",
                title=f"after {rounds} rounds",
            )
            ax.set_xticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.grid(visible=True, which="both", alpha=0.25)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Make the runs that are missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fedcspack")
    parser.add_argument("--data", default="", help="folder of MNIST (default: its usual place)")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    runs = [] if options.fresh or not RESULTS.exists() else list(json.loads(RESULTS.read_text("utf-8"))["runs"])
    done = {(run["row"], run["seed"]) for run in runs}
    for seed in SEEDS:
        for label in ROWS:
            if (label, seed) not in done:
                made = make(label, seed, options.data)
                runs.append(made)
                write(RESULTS, runs)
                print(json.dumps(made), flush=True)
    print(markdown(runs))


if __name__ == "__main__":
    main()
