"""Seconds per round on real nodes: separate evaluation, a shorter executor poll, evaluation inside training.

    python -m benchmarks.latency --rounds 5 --repeat 3

Two deployments of two nodes each on this machine (gRPC, TLS, node authentication, processes apart), one whose executors
look for tasks every second, as Flower's do by default, and one where they do every 0.1 s. Runs of the three variants
alternate, so that other load on the machine meets all alike; ratios are taken within a repetition. A run's first round,
which starts everything, and its last, which has an evaluation of its own in every variant, are left out.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

from tests.e2e.federation import Federation, running

POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
VARIANTS = {
    "evaluation apart, poll 1 s": ("1", False),
    "evaluation apart, poll 0.1 s": ("0.1", False),
    "evaluation in training, poll 0.1 s": ("0.1", True),
}


def seconds(federation: Federation, rounds: int, *, in_train: bool) -> float:
    """Median seconds of a round of one run."""
    ended = federation.run(
        algorithm="fedavg", num_clients=2, num_server_rounds=rounds, fraction_train=1.0, round_timeout=300.0,
        train__device="cpu", model__hidden="16", seed=1, evaluate_in_train=in_train,
    )  # fmt: skip
    if ended.code:
        raise SystemExit(ended.said)
    lines = (Path(ended.out.splitlines()[-1]) / "history.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["seconds"] for line in lines[1:-1])


def main() -> None:
    """Measure and print one line per run, then the medians."""
    parser = argparse.ArgumentParser(description="Seconds per round on real nodes.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with running({POLL: "1"}) as slow, running({POLL: "0.1"}) as fast:
        for number in range(arguments.repeat):
            for name, (poll, in_train) in VARIANTS.items():
                taken = seconds(slow if poll == "1" else fast, arguments.rounds, in_train=in_train)
                found[name].append(taken)
                print(f"{number}  {name:36}  {taken:5.1f} s  load {os.getloadavg()[0]:.1f}", flush=True)
    first = next(iter(found.values()))
    for name, taken in found.items():
        ratios = [own / base for own, base in zip(taken, first, strict=True)]
        print(f"{name:36}  median {statistics.median(taken):5.1f} s  ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
