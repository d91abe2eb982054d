"""FedGAMMA: SCAFFOLD, option 2, whose gradients are taken at y + e.

e = rho g / |g|                             g = gradient of the batch at y, without weight decay
y <- y - lr (g~ - c_i + c)                  g~ = gradient of the same batch at y + e
"""

from tests.reference.problem import Task
from tests.reference.rounds import Trained, descend, toward
from tests.reference.scaffold import SCAFFOLD


class FedGAMMA(SCAFFOLD):
    def __init__(self, task: Task, rho: float = 0.01, server_lr: float = 1.0, weighting: str = "uniform") -> None:
        super().__init__(task, server_lr, weighting=weighting)
        self.rho = rho

    def local(self, client: int) -> Trained:
        shift = self.control - self.controls[client]
        return descend(
            self.task,
            client,
            self.t,
            self.x,
            self.buffers,
            perturb=lambda g: toward(g, self.rho),
            correct=lambda g, _: g + shift,
        )
