"""The memory of a run doesn't grow with its rounds, nor with ``streaming`` with its clients."""

import ctypes
import functools
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedstrat.simulation import InProcessGrid
from fedstrat.strategies import ALGORITHMS
from tests.strategies import small

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads its memory from /proc"),
]

WIDTH = 100_000  # 0.9 million parameters, 3.6 MB: one model a round that isn't let go shows


def wide(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(small.FEATURES, width), nn.Tanh(), nn.Linear(width, small.CLASSES))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("algorithm", ["craft", "scaffold", "fedcspack", "fedvssam"])
def test_memory_after_round_30_is_that_after_round_5(algorithm: str, tmp_path: Path) -> None:
    used: list[int] = []

    def on_round(report: Any) -> None:
        used.append(resident_bytes())

    app = small.client_app(wide, loader=lambda client: small.batches(client, None))
    grid = InProcessGrid(app, 5, run_config={"state-dir": str(tmp_path)})
    strategy = ALGORITHMS[algorithm].strategy(seed=7, fraction_evaluate=0.0)
    small.start(strategy, grid, wide, 30, on_round=on_round, evaluate_fn=None)
    print(algorithm, "MB after rounds 5 and 30:", used[4] // 10**6, used[29] // 10**6)
    assert used[29] <= 1.1 * used[4]


def test_memory_after_run_8_is_that_after_run_2(tmp_path: Path) -> None:
    """Each run with a strategy, a grid and client states of its own, in one process."""
    used: list[int] = []
    app = small.client_app(wide, loader=lambda client: small.batches(client, None))
    for _ in range(8):
        grid = InProcessGrid(app, 5, run_config={"state-dir": str(tmp_path)})
        strategy = ALGORITHMS["scaffold"].strategy(seed=7, fraction_evaluate=0.0)
        small.start(strategy, grid, wide, 3, evaluate_fn=None)
        used.append(resident_bytes())
    print("MB after runs 2 and 8:", used[1] // 10**6, used[7] // 10**6)
    assert used[7] <= 1.1 * used[1]


def test_memory_does_not_grow_with_the_clients_that_were_met(tmp_path: Path) -> None:
    """FedCSPACK, 11 million parameters, 1000 clients of which every round meets 4 others: their states are files."""
    used: list[int] = []
    met: set[str] = set()

    def on_round(report: Any) -> None:
        used.append(resident_bytes())
        met.update(report.trained)

    def net() -> nn.Module:
        return wide(1_100_000)

    app = small.client_app(net, loader=lambda client: small.batches(client % 5, None))
    grid = InProcessGrid(app, 1000, run_config={"state-dir": str(tmp_path)})
    strategy = ALGORITHMS["fedcspack"].strategy(seed=7, fraction_train=0.004, fraction_evaluate=0.0, keep_ratio=0.05)
    small.start(strategy, grid, net, 6, on_round=on_round, evaluate_fn=None)
    kept = sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors"))
    print("MB after each round:", [u // 10**6 for u in used], "of", len(met), "clients,", kept // 10**6, "MB of files")
    assert len(met) > 20
    assert kept > len(met) * 2 * 4 * 11_000_000  # two models each
    assert used[5] - used[1] < 0.1 * kept


def added_bytes(work: Callable[[], object]) -> int:
    """By how much ``work`` raises this process's memory at its peak."""

    def status(entry: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(entry))

    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD: whatever is larger goes back to the system when it is freed
    libc.malloc_trim(0)  # what was freed before must not serve again
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def test_streaming_needs_a_few_models_however_many_reply() -> None:
    """A round of FedAvg over 5 and over 30 clients; without streaming it holds all their replies."""

    def steps(session: Any, model: Any, client: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.001 * client)
        gc.collect()  # the clients before left models in reference cycles

    model_bytes = 4 * sum(p.numel() for p in wide().parameters())

    def added(clients: int, *, streaming: bool) -> float:
        grid = InProcessGrid(small.own_loop(wide, steps, examples=lambda _: 1), clients)
        strategy = ALGORITHMS["fedavg"].strategy(seed=7, fraction_evaluate=0.0, streaming=streaming)
        start = functools.partial(strategy.start, grid, small.initial(wide), num_rounds=1)
        return added_bytes(start) / model_bytes

    added(2, streaming=True)  # what a first run leaves behind
    few, many, together = added(5, streaming=True), added(30, streaming=True), added(30, streaming=False)
    print("models at the peak: 5 clients", few, "30 clients", many, "all at once", together)
    assert many < few + 2.0
    assert together > many + 20.0
