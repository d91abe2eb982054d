"""What a round's updates say about the clients, for the history; nothing here changes a step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedstrat.aggregation.diagnostics import agreement, drift, whole
from fedstrat.aggregation.gram import rounding_of
from fedstrat.aggregation.groups import group_names
from fedstrat.naming import kebab
from fedstrat.payloads import Update
from fedstrat.strategies.state import ServerState

if TYPE_CHECKING:
    from fedstrat.strategies.base import FedStrategy

MOST_CLIENTS = 100
"""Of more clients every second, third, … is looked at: the products cost m^2 d."""


@torch.no_grad()
def measured(
    strategy: "FedStrategy[Any, Any]", state: ServerState, updates: Sequence[Update[Any]]
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Measure agreement and drift.

    Args:
        strategy: Whose updates.
        state: The state before the step.
        updates: This round's, in client order, never empty.

    Returns:
        (numbers about whole updates, layer -> numbers about its part). No layers where updates aren't cut by layer,
        and neither for an update without any parameter.
    """
    looked_at = updates[:: -(-len(updates) // MOST_CLIENTS)]
    grams = strategy.grams(state, looked_at)
    if not grams:
        return {}, {}
    x = state.params
    total = whole(grams)
    numbers = {**drift(total), **agreement(total, rounding_of(x))}
    if "rank" in numbers:
        numbers["update_rank"] = numbers.pop("rank")
    layers = group_names(x, "layer")
    parts = {
        name: {kebab(key): value for key, value in agreement(gram, rounding_of(x, layers[name])).items()}
        for name, gram in grams.items()
        if name in layers and len(layers) > 1
    }
    return numbers, {name: part for name, part in parts.items() if part}
