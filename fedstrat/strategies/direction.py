"""The mean direction of a local step, which FedVSSAM and MoFedSAM build their memory from."""

from collections.abc import Sequence
from typing import Any

import torch

from fedstrat.aggregation.mean import mean_deltas
from fedstrat.payloads import Params, Update


def mean_step_direction(params: Params, updates: Sequence[Update[Any]]) -> tuple[dict[str, torch.Tensor], float] | None:
    """Return ``(mean_S (x - y_i) / L_i, mean_S L_i)`` with ``L_i = lr_sum`` of client i.

    The server never assumes a client's learning rate or number of steps. Clients without a step are left out;
    None when nobody took one. The mean is uniform: the objective is (1/N) sum f_i.
    """
    moving = [u for u in updates if u.num_steps > 0 and u.lr_sum > 0.0]
    if not moving:
        return None
    share = 1.0 / len(moving)
    direction = mean_deltas(params, [u.params for u in moving], [-share / u.lr_sum for u in moving])
    return direction, share * sum(u.lr_sum for u in moving)
