"""Ditto: a personal model v_i beside the global path of any other twin.

v_i = x at client i's first participation, its running statistics those received. In every participation, before the
global path,

    v_i <- v_i - lr (g_i(v_i) + lam (v_i - x))       for the client's epochs, x as received
"""

from tests.reference.fedavg import FedAvg
from tests.reference.problem import Array, Buffers, Task
from tests.reference.rounds import Trained, Twin, descend


class Ditto(Twin):
    def __init__(self, task: Task, lam: float = 1.0, aggregator: type[Twin] = FedAvg) -> None:
        self.inner = aggregator(task)
        self.task, self.lam = task, lam
        self.own: dict[int, tuple[Array, Buffers]] = {}

    @property
    def x(self) -> Array:
        return self.inner.x

    @property
    def buffers(self) -> Buffers:
        return self.inner.buffers

    @property
    def t(self) -> int:
        return self.inner.t

    def round(self, cohort: list[int]) -> dict[int, Trained]:
        x, start = self.x, self.buffers
        for i in cohort:
            v, buffers = self.own.get(i, (x, start))
            moved = descend(self.task, i, self.t + 1, v, buffers, correct=lambda g, y: g + self.lam * (y - x))
            self.own[i] = moved.y, moved.buffers
        return self.inner.round(cohort)
