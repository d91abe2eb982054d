"""FedSAM: FedAvg's server; clients descend along the gradient at the worst point nearby.

e = rho g / |g|,   g = gradient of the batch at y, without weight decay; one norm over all parameters
y <- y - lr (gradient of the same batch at y + e)
"""

from tests.reference.fedavg import FedAvg
from tests.reference.problem import Task
from tests.reference.rounds import Trained, descend, toward


class FedSAM(FedAvg):
    def __init__(self, task: Task, rho: float = 0.05, server_lr: float = 1.0) -> None:
        super().__init__(task, server_lr)
        self.rho = rho

    def local(self, client: int) -> Trained:
        return descend(self.task, client, self.t, self.x, self.buffers, perturb=lambda g: toward(g, self.rho))
