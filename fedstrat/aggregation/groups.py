"""Layer groups: which parameters share one direction, and passes over a group's displacements in column blocks."""

from collections.abc import Callable, Mapping, Sequence

import torch

from fedstrat.aggregation.conflict import Products, Solution, combine, products
from fedstrat.aggregation.gram import Displacements, Piece, flat, in_range, put, rounding_of, take

Tensors = Mapping[str, torch.Tensor]

_MOST_SENSITIVE = 300.0


def layer_of(name: str) -> str:
    """Name the layer of a parameter: ``M.weight`` and ``M.bias`` belong to M, any other name stands alone."""
    module, _, last = name.rpartition(".")
    return module if last in ("weight", "bias") else name


def group_names(params: Tensors, grouping: str | Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Put parameter names into groups, in order of first appearance.

    Args:
        params: The trainable parameters; only names and shapes are read.
        grouping: "layer", "merged" (see :func:`merged`), "tensor", "model", or a mapping parameter name -> group.

    Raises:
        KeyError: The mapping lacks a name.
    """
    if grouping == "merged":
        grouping = merged(params)
    groups: dict[str, list[str]] = {}
    for name in params:
        if isinstance(grouping, str):
            group = {"layer": layer_of(name), "tensor": name, "model": "model"}[grouping]
        else:
            group = grouping[name]
        groups.setdefault(group, []).append(name)
    return {group: tuple(members) for group, members in groups.items()}


def merged(params: Tensors) -> dict[str, str]:
    """Name the group of every parameter: its layer, and for a normalisation the convolution just before it.

    A normalisation is a layer of vectors alone, as long as the convolution has channels, in the same module. So a
    ResNet-20 has 20 groups, as the authors of CRAFT have it.
    """
    groups: dict[str, str] = {}
    convolution, channels = "", 0
    for name, p in params.items():
        layer = layer_of(name)
        if p.ndim > 1:
            convolution, channels = (layer, len(p)) if p.ndim > 2 else ("", 0)
        joins = p.ndim == 1 and len(p) == channels and layer.rpartition(".")[0] == convolution.rpartition(".")[0]
        groups[name] = convolution if joins else layer
    return groups


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
    """Solve one group and build its direction, in two passes that hold one block of columns.

    Large groups of float32 numbers are multiplied in float32 and, where that is too coarse, once more in float64.

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
    single = rows.may_be_single(names)
    vectors = None if previous is None else flat(previous, names)

    def reference(piece: Piece, columns: int) -> torch.Tensor | None:
        if vectors is None:
            return None
        take(vectors, piece, there := torch.empty(columns, dtype=vectors[names[0]].dtype))
        return there

    def inner() -> Products:
        blocks = rows.blocks(names, single=single)
        return products(((block, reference(piece, block.shape[1])) for piece, block in blocks), len(clients))

    found = inner()
    if single and not (in_range(found.deltas) and torch.isfinite(found.reference).all()):
        single = False
        found = inner()
    solution = solve(found)
    if single and solution.sensitivity >= _MOST_SENSITIVE:  # an entry of A is wrong by about 1e-7: g would be by > 1e-5
        single = False
        solution = solve(inner())
    direction = {name: torch.empty(params[name].numel(), dtype=torch.float64) for name in names}
    for piece, _, total in rows.sums(solution.deltas, names, single=single):
        put(direction, piece, combine(solution, total.double(), reference(piece, len(total))))
    return solution, {name: vector.view(params[name].shape) for name, vector in direction.items()}
