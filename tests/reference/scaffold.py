"""SCAFFOLD: control variates c (server) and c_i (client), 0 at first.

    y <- y - lr (g - c_i + c)
    option 1:  c_i+ = grad f_i(x) over all of the client's data, weight decay being part of f_i
    option 2:  c_i+ = c_i - c + (x - y_i) / (sum of the lr of the steps)
    x <- x - server_lr * sum_S a_i D_i
    c <- c + sum_S b_i (c_i+ - c_i)

weighting "uniform":   a_i = 1/|S|,            b_i = 1/N
weighting "examples":  a_i = n_i / sum_S n_j,  b_i = n_i / sum_N n_j

N counts the clients known so far; a client that becomes known brings c_i = 0, so c shrinks by
(old total)/(new total) and c = sum_N b_i c_i holds after every round.
"""

import numpy as np

from tests.reference.problem import Array, Task
from tests.reference.rounds import Trained, Twin, descend


class SCAFFOLD(Twin):
    def __init__(
        self,
        task: Task,
        server_lr: float = 1.0,
        option: int = 2,
        weighting: str = "uniform",
        known: int | None = None,
    ) -> None:
        super().__init__(task)
        self.server_lr, self.option, self.weighting = server_lr, option, weighting
        self.control = np.zeros_like(task.x0)
        self.controls: dict[int, Array] = {}
        self.meet(range(len(task.rows) if known is None else known))

    def mass(self, client: int) -> float:
        return self.task.num_examples(client) if self.weighting == "examples" else 1

    def meet(self, clients: range | list[int]) -> None:
        """Clients become known: c is a mean over more of them."""
        before = sum(map(self.mass, self.controls))
        for i in clients:
            self.controls.setdefault(i, np.zeros_like(self.x))
        if before:
            self.control = self.control * (before / sum(map(self.mass, self.controls)))

    def local(self, client: int) -> Trained:
        shift = self.control - self.controls[client]
        return descend(self.task, client, self.t, self.x, self.buffers, correct=lambda g, _: g + shift)

    def move(self, trained: dict[int, Trained]) -> None:
        present, everybody = sum(map(self.mass, trained)), sum(map(self.mass, self.controls))
        x, c = self.x, self.control
        for i, reply in trained.items():
            if self.option == 1:
                new = self.task.full_gradient(i, x, self.buffers)
            else:
                new = self.controls[i] - c + (x - reply.y) / reply.lr_sum
            self.x = self.x - self.server_lr * self.mass(i) / present * (x - reply.y)
            self.control = self.control + self.mass(i) / everybody * (new - self.controls[i])
            self.controls[i] = new
