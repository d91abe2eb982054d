"""Layer groups: which parameters share one direction, and passes over a group's displacements in column blocks."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from fedstrat.aggregation.conflict import Products, Solution, combine, products
from fedstrat.aggregation.gram import Displacements, rounding_of

Tensors = Mapping[str, torch.Tensor]


def layer_of(name: str) -> str:
    """Name the layer of a parameter: ``M.weight`` and ``M.bias`` belong to M, any other name stands alone."""
    module, _, last = name.rpartition(".")
    return module if last in ("weight", "bias") else name


def group_names(names: Sequence[str], grouping: str | Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Put parameter names into groups, in order of first appearance.

    Args:
        names: The trainable parameters.
        grouping: "layer", "tensor", "model", or a mapping parameter name -> group.

    Raises:
        KeyError: The mapping lacks a name.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        if isinstance(grouping, str):
            group = {"layer": layer_of(name), "tensor": name, "model": "model"}[grouping]
        else:
            group = grouping[name]
        groups.setdefault(group, []).append(name)
    return {group: tuple(members) for group, members in groups.items()}


def activity_threshold(params: Tensors, names: Sequence[str], min_norm: float) -> float:
    """Return ``tau = max(min_norm, 4 eps32 |x^q|)``, below which a displacement is the rounding of the weights."""
    return max(min_norm, rounding_of(params, names))


def group_direction(
    params: Tensors,
    clients: Sequence[Tensors],
    names: Sequence[str],
    previous: Tensors | None,
    solve: Callable[[Products], Solution],
) -> tuple[Solution, dict[str, torch.Tensor]]:
    """Solve one group and build its direction, in two passes that hold one column block in float64.

    Args:
        params: x.
        clients: y_i, one mapping per client.
        names: The group's parameters.
        previous: The previous direction, or None.
        solve: The closed form on the group's inner products.

    Returns:
        The solution, and the direction by parameter name, float64.
    """
    rows = Displacements(params, clients)

    def blocks() -> Iterator[tuple[str, slice, torch.Tensor, torch.Tensor | None]]:
        for name in names:
            reference = None if previous is None else previous[name].reshape(-1)
            for columns, block in rows.blocks(name):
                yield name, columns, block, None if reference is None else reference[columns]

    solution = solve(products(((block, reference) for _, _, block, reference in blocks()), len(clients)))
    direction = {name: torch.empty(params[name].numel(), dtype=torch.float64) for name in names}
    for name, columns, block, reference in blocks():
        direction[name][columns] = combine(solution, block, reference)
    return solution, {name: flat.reshape(params[name].shape) for name, flat in direction.items()}
