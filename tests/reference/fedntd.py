"""FedNTD: FedAvg's server; a batch's loss has the further term

    beta * temperature^2 * mean KL(softmax(q_g / temperature) | softmax(q / temperature))

q are the outputs for all classes but the true one; q_g those of x, its running statistics at rest.
"""

import numpy as np

from tests.reference.fedavg import FedAvg
from tests.reference.objective import Term, WithTerm, forward, from_outputs
from tests.reference.problem import Array, Task
from tests.reference.rounds import Trained, descend


def others(s: Array, labels: Array, temperature: float) -> Array:
    """Softmax over the classes that aren't true; 0 at the true one."""
    e = np.exp(s / temperature)
    e[np.arange(len(s)), labels] = 0
    return e / e.sum(axis=1, keepdims=True)


class FedNTD(FedAvg):
    def __init__(self, task: Task, beta: float = 1.0, temperature: float = 1.0) -> None:
        super().__init__(task)
        self.beta, self.temperature = beta, temperature

    def local(self, client: int) -> Trained:
        task = WithTerm(**vars(self.task), term=self.term(client))
        return descend(task, client, self.t, self.x, self.buffers)

    def term(self, _client: int) -> Term:
        """The gradient of the further term; the same function for all clients."""
        x, rest = self.x, self.buffers

        def gradient(y: Array, rows: Array, labels: Array, mean: Array, var: Array) -> Array:
            at = forward(self.task, y, rows, mean, var)
            p = others(at.s, labels, self.temperature)
            p_g = others(forward(self.task, x, rows, rest.mean, rest.var).s, labels, self.temperature)
            # d KL(p_g | softmax(q / T)) / dq = (p - p_g) / T
            return from_outputs(at, self.beta * self.temperature * (p - p_g) / len(rows), y)

        return gradient
