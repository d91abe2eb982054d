"""q-FedAvg: F_i is client i's loss over all its data at x, L = 1 / (mean over S of the clients' mean lr).

w_i = L D_i
x <- x - sum_i F_i^q w_i / sum_i [ q F_i^(q - 1) |w_i|^2 + L F_i^q ]
"""

from tests.reference.problem import Task
from tests.reference.rounds import Trained, Twin


class QFedAvg(Twin):
    def __init__(self, task: Task, q: float = 0.1) -> None:
        super().__init__(task)
        self.q = q
        self.losses: dict[int, float] = {}

    def local(self, client: int) -> Trained:
        self.losses[client] = self.task.full_loss(client, self.x, self.buffers) + 1e-10
        return super().local(client)

    def move(self, trained: dict[int, Trained]) -> None:
        q = self.q
        L = 1 / (sum(reply.lr_sum / reply.num_steps for reply in trained.values()) / len(trained))
        above, below = 0.0, 0.0
        for i, reply in trained.items():
            F, w = self.losses[i], L * (self.x - reply.y)
            above = above + F**q * w
            below = below + q * F ** (q - 1) * float(w @ w) + L * F**q
        self.x = self.x - above / below
