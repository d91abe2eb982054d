"""Peak memory of one server step beside the replies, in a process of its own: ``python -m …memory craft 10``."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.performance.problems import exchange_of, parameters, quiet, trained
from benchmarks.performance.timing import Row, apart


def added_mb(work: Callable[[], object]) -> float:
    """Megabytes by which ``work`` raises this process's memory at its peak (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not serve again
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    before = memory_mb("VmRSS")
    work()
    return memory_mb("VmHWM") - before


def memory_mb(entry: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(entry)) / 1024.0


def step(which: str, m: int) -> float:
    """Megabytes that a step on ResNet-18 adds to the peak."""
    from flwr.serverapp.strategy import FedAvg as FlowerFedAvg  # noqa: PLC0415

    import fedstrat  # noqa: PLC0415
    from benchmarks.performance.server import craft, naive_craft  # noqa: PLC0415

    x = parameters("resnet18")
    ys = trained(x, m)
    if which in ("craft", "naive"):
        previous = trained(x, 1)[0]
        return added_mb(lambda: (craft if which == "craft" else naive_craft)(x, ys, previous))
    model, sent, replies = exchange_of(x, ys)
    if which == "fedavg":
        strategy = fedstrat.FedAvg()
        strategy._adopt(model)
        strategy._sent = sent
        return added_mb(lambda: strategy.aggregate_train(1, replies))
    flower = FlowerFedAvg()
    flower.current_arrays = model
    return added_mb(lambda: flower.aggregate_train(1, replies))


def memory(*, quick: bool) -> Iterator[Row]:
    m = 10
    pairs = [("fedavg", "flower", "FedAvg aggregate_train", "Flower's own")]
    if not quick:
        pairs.append(("craft", "naive", "CRAFT directions", "pinv per layer"))
    for ours, theirs, name, against in pairs:
        took = [max(float(apart(__spec__.name, side, str(m))), 1.0) for side in (ours, theirs)]
        replies = m * 44.7
        yield Row(f"memory beside {replies:.0f} MB of replies: {name}, resnet18, m = {m}", *took, against, unit="MB")


if __name__ == "__main__":
    quiet()
    print(f"{step(sys.argv[1], int(sys.argv[2])):.1f}")
