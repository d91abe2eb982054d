"""MOON: FedAvg's server; on a client that took part before, a batch's loss has the further term

    mu * mean log(1 + exp((s_p - s_g) / temperature)),    s_g = cos(h, h_g),  s_p = cos(h, h_p)

h is the hidden layer of the trained model; h_g that of x, h_p that of the client's own last y, each with the running
statistics of its model at rest.
"""

import numpy as np

from tests.reference.fedavg import FedAvg
from tests.reference.objective import Term, WithTerm, forward, from_hidden
from tests.reference.problem import Array, Buffers, Task
from tests.reference.rounds import Trained, descend


def cosines(a: Array, b: Array) -> tuple[Array, Array]:
    """Cosines of the rows, and their gradients in a."""
    la, lb = (np.linalg.norm(v, axis=1, keepdims=True) for v in (a, b))
    s = (a * b).sum(axis=1, keepdims=True) / (la * lb)
    return s, b / (la * lb) - s * a / la**2


class MOON(FedAvg):
    def __init__(self, task: Task, mu: float = 1.0, temperature: float = 0.5) -> None:
        super().__init__(task)
        self.mu, self.temperature = mu, temperature
        self.previous: dict[int, tuple[Array, Buffers]] = {}

    def local(self, client: int) -> Trained:
        known = client in self.previous
        task = WithTerm(**vars(self.task), term=self.term(client)) if known else self.task
        return descend(task, client, self.t, self.x, self.buffers)

    def term(self, client: int) -> Term:
        """The gradient of the further term of a client that took part before."""
        received, own = (self.x, self.buffers), self.previous[client]

        def gradient(y: Array, rows: Array, _labels: Array, mean: Array, var: Array) -> Array:
            at = forward(self.task, y, rows, mean, var)
            (s_g, ds_g), (s_p, ds_p) = (
                cosines(at.h, forward(self.task, model, rows, rest.mean, rest.var).h) for model, rest in (received, own)
            )
            slope = 1 / (1 + np.exp((s_g - s_p) / self.temperature)) / self.temperature
            return from_hidden(at, self.mu * slope * (ds_p - ds_g) / len(rows))

        return gradient

    def move(self, trained: dict[int, Trained]) -> None:
        super().move(trained)
        self.previous |= {i: (reply.y, reply.buffers) for i, reply in trained.items()}
