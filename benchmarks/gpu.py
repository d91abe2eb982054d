"""A CUDA machine in a few minutes: ``python -m benchmarks.gpu [--out FILE]``.

Three questions, each against the CPU of the same machine:

* Is it right? One federated round per method from the same seeds on both; the models may differ by float32's rounding.
* How fast are local steps? Plain and sharpness-aware steps of a ResNet-20, in float32, bf16 and channels-last.
* What does the server's step cost? CRAFT and FedAvg on a ResNet-20 with 100 replies on the CPU, and CRAFT with its
  products on the GPU.

Written on a machine without CUDA and never run on a GPU yet.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedstrat
from benchmarks.performance.problems import parameters, trained
from benchmarks.performance.server import craft
from client_app.app import app
from fedstrat.aggregation.device import products_on
from fedstrat.aggregation.mean import mean_deltas
from fedstrat.local.optimizer import RuleOptimizer
from fedstrat.models import build, trainable_names
from fedstrat.payloads import decode
from fedstrat.runs import config
from fedstrat.runs.model import build_model
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies import ALGORITHMS

METHODS = ("fedavg", "scaffold", "craft", "fedsam", "fedvssam", "fedcspack")
VARIANTS = (("cpu", False, False), ("cuda", False, False), ("cuda", True, False), ("cuda", True, True))
"""Device, bf16, channels-last."""
SECONDS = 5.0
LARGEST_DIFFERENCE = 1e-3
"""Of the models after a round, relative to how far they moved."""


def after_a_round(algorithm: str, device: str) -> dict[str, torch.Tensor]:
    run = config.parse({"algorithm": algorithm, "num-clients": 10, "fraction-train": 0.5, "train.device": device})
    torch.manual_seed(0)
    model = build_model(run.flat)
    result = run.strategy(trainable=trainable_names(model)).start(
        grid=InProcessGrid(app, run.num_clients, run_config=run.flat),
        initial_arrays=fedstrat.to_arrays(model),
        num_rounds=1,
    )
    before = {n: p.detach() for n, p in model.named_parameters()}
    return {n: t - before[n] for n, t in decode(result.arrays, "arrays").items()}


def difference(algorithm: str) -> float:
    """How far the GPU's round ends from the CPU's, relative to the round's length."""
    here, there = (after_a_round(algorithm, device) for device in ("cpu", "cuda"))
    squares = [(float((here[n] - there[n]).square().sum()), float(here[n].square().sum())) for n in here]
    return (sum(a for a, _ in squares) / max(sum(b for _, b in squares), 1e-30)) ** 0.5


def steps_per_second(device: str, algorithm: str, *, amp: bool, channels_last: bool, batch: int = 128) -> float:
    model = build("resnet20", input_shape=(3, 32, 32), num_classes=10).to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    settings = {"rho": 0.05} if algorithm == "fedsam" else {}
    rule = ALGORITHMS[algorithm].rule(**settings)
    rule.begin(dict(model.named_parameters()), {}, None, None)
    optimizer = RuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), rule)
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)

    def closure() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=amp):
            return nn.functional.cross_entropy(model(x), y)

    for _ in range(3):
        optimizer.step(closure)
    _wait(device)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < SECONDS:
        for _ in range(5):
            optimizer.step(closure)
        _wait(device)
        count += 5
    return count / (time.perf_counter() - begun)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON to this file")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f"This machine has no CUDA device that torch {torch.__version__} can use, so there is nothing to measure."
            " `make bench` measures a CPU.",
            file=sys.stderr,
        )
        return 2
    logging.getLogger("flwr").setLevel(logging.ERROR)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(found["device"])
    found["difference"] = {method: difference(method) for method in METHODS}
    for method, distance in found["difference"].items():
        verdict = "ok" if distance <= LARGEST_DIFFERENCE else "TOO FAR"
        print(f"one round, GPU against CPU: {method:10} {distance:.1e} {verdict}")
    found["steps per second"] = {}
    for algorithm in ("fedavg", "fedsam"):
        for device, amp, channels_last in VARIANTS:
            name = f"{device} {algorithm}{' bf16' if amp else ''}{' channels-last' if channels_last else ''}"
            rate = steps_per_second(device, algorithm, amp=amp, channels_last=channels_last)
            found["steps per second"][name] = rate
            print(f"ResNet-20, batches of 128: {name:32} {rate:8.1f} steps/s")
    x = parameters("resnet20")
    ys, previous = trained(x, 100), trained(x, 1)[0]

    def on_gpu() -> None:
        with products_on(torch.device("cuda")):
            craft(x, ys, previous)

    on_gpu()  # the first products load libraries
    found["server seconds"] = {
        "CRAFT": seconds(lambda: craft(x, ys, previous)),
        "CRAFT, products on the GPU": seconds(on_gpu),
        "FedAvg": seconds(lambda: mean_deltas(x, ys, [0.01] * 100)),
    }
    print(f"server's step, 100 replies of a ResNet-20: {found['server seconds']}")
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if max(found["difference"].values()) > LARGEST_DIFFERENCE else 0


if __name__ == "__main__":
    sys.exit(main())
