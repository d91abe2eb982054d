"""Learning-rate schedules: per round, constant inside a round."""

import math

from fedstrat.errors import ConfigError


def scheduled_lr(lr: float, schedule: str, server_round: int, *, decay: float = 1.0, num_rounds: int = 0) -> float:
    """Return the learning rate of a round t, from 1.

    ``constant``: lr;  ``exponential``: lr * decay^(t-1);  ``cosine``: lr * (1 + cos(pi (t-1) / T)) / 2.

    Raises:
        ConfigError: The schedule has another name, or ``cosine`` doesn't know the number of rounds.
    """
    if schedule == "constant":
        return lr
    if schedule == "exponential":
        return lr * decay ** (server_round - 1)
    if schedule == "cosine":
        if num_rounds < 1:
            raise ConfigError("train.lr-schedule 'cosine' needs num-server-rounds >= 1 in the run config")
        return lr * (1.0 + math.cos(math.pi * min(server_round - 1, num_rounds) / num_rounds)) / 2.0
    raise ConfigError(f"train.lr-schedule: expected 'constant', 'exponential' or 'cosine', but got '{schedule}'")
