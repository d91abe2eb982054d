"""Displacements as rows of a matrix that is never built: their inner products, and their combinations.

Methods that project, normalise or weigh whole client updates only need the small Gram matrix of the rows. They work
out one coefficient per row on it, in float64; the model-sized vectors are read twice, once for the products and once
for the combination, one column block at a time.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fedstrat.aggregation.conflict import column_blocks

Tensors = Mapping[str, torch.Tensor]

_ROUNDING = 4.0 * float(torch.finfo(torch.float32).eps)


@dataclass(frozen=True)
class Displacements:
    """Rows ``y_i - x`` of this round's clients, then displacements remembered from earlier rounds.

    Attributes:
        params: x.
        clients: y_i, one mapping per client.
        remembered: Displacements, one mapping per client that is absent now.
    """

    params: Tensors
    clients: Sequence[Tensors]
    remembered: Sequence[Tensors] = ()

    def __len__(self) -> int:
        return len(self.clients) + len(self.remembered)

    def gram(self, names: Sequence[str] | None = None) -> torch.Tensor:
        """Return the rows' inner products over some parameters (all by default), shape (rows, rows), float64."""
        products = torch.zeros(len(self), len(self), dtype=torch.float64)
        for name in self.params if names is None else names:
            for _, block in self.blocks(name):
                products.addmm_(block, block.T)
        return products

    def combined(self, coefficients: torch.Tensor, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Return ``sum_i coefficients_i row_i`` over some parameters (all by default), float64.

        Args:
            coefficients: Shape (rows,), float64.
            names: The parameters.
        """
        result = {}
        for name in self.params if names is None else names:
            flat = torch.empty(self.params[name].numel(), dtype=torch.float64)
            for columns, block in self.blocks(name):
                flat[columns] = coefficients @ block
            result[name] = flat.reshape(self.params[name].shape)
        return result

    def blocks(self, name: str) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield one parameter's columns and the rows there, shape (rows, columns), float64, a block at a time."""
        x = self.params[name].reshape(-1)
        ys = [client[name].reshape(-1) for client in self.clients]
        old = [row[name].reshape(-1) for row in self.remembered]
        for columns in column_blocks(x.numel()):
            block = torch.stack([y[columns].to(torch.float64) for y in ys]) - x[columns].to(torch.float64)
            yield (
                columns,
                torch.cat([block, torch.stack([d[columns].to(torch.float64) for d in old])]) if old else block,
            )


def rounding_of(params: Tensors, names: Sequence[str] | None = None) -> float:
    """Length below which a displacement of these parameters is float32 noise without a direction, ``4 eps32 |x|``."""
    squares = [float(params[n].double().square().sum()) for n in (params if names is None else names)]
    return _ROUNDING * math.sqrt(math.fsum(squares))


def last_digit_of(params: Tensors, names: Sequence[str]) -> float:
    """Length of what rounding to the parameters' own dtypes changes at most, ``(eps / 2) |x|``."""
    halves = [torch.finfo(params[n].dtype).eps / 2.0 * float(params[n].double().norm()) for n in names]
    return math.hypot(*halves)


def has_direction(lengths: torch.Tensor, smallest: float) -> torch.Tensor:
    """Tell rows that have a direction (longer than ``smallest``, and not 0) from those that don't."""
    return (lengths >= smallest) & (lengths > 0.0)
