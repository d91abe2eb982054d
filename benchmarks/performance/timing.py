"""Two sides, timed in turns: their ratio holds on a busy machine too."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: What was measured.
        ours: CPU milliseconds (on Ray: wall), or megabytes.
        theirs: The same of the side that it is compared with.
        against: What that side is.
        goal: Smallest ``theirs / ours`` that was aimed at; None where nothing was.
        unit: "ms" or "MB".
    """

    name: str
    ours: float
    theirs: float
    against: str
    goal: float | None = None
    unit: str = "ms"

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


def cpu_ms(work: Callable[[], Any]) -> float:
    begun = time.process_time()
    work()
    return (time.process_time() - begun) * 1e3


def alternate(
    ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int, *, warm: bool = True
) -> tuple[float, float]:
    """As :func:`in_turns`, for two sides."""
    a, b = in_turns((ours, theirs), repeats, warm=warm)
    return a, b


def in_turns(sides: Sequence[Callable[[], Any]], repeats: int, *, warm: bool = True) -> list[float]:
    """Return the CPU milliseconds of some sides, each the best of ``repeats``, run in turns after one warm-up."""
    if warm:
        for side in sides:
            side()
    turns = [[cpu_ms(side) for side in sides] for _ in range(repeats)]
    return [min(took) for took in zip(*turns, strict=True)]


def apart(module: str, *arguments: str, seconds: float | None = None) -> str:
    """Run a module of this suite in a process of its own and return what it prints last.

    Raises:
        subprocess.TimeoutExpired: It took longer than ``seconds``, and was ended.
    """
    command = [sys.executable, "-m", module, *arguments]
    # Files, since a pipe stays open as long as any process that its child started.
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as wrong:
        done = subprocess.run(command, cwd=ROOT, stdout=printed, stderr=wrong, check=False, timeout=seconds)
        printed.seek(0)
        wrong.seek(0)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{wrong.read()[-2000:]}")
        return printed.read().strip().splitlines()[-1]
