"""Displacements as rows of a matrix that is never built: their inner products, and their combinations.

Methods that project, normalise or weigh whole client updates only need the small Gram matrix of the rows. They work
out one coefficient per row on it, in float64; the model-sized vectors are read twice, once for the products and once
for the combination, one block of columns at a time. So the step needs O(d) beside the replies.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fedstrat.aggregation.conflict import block_columns
from fedstrat.aggregation.device import lent, zeros

Tensors = Mapping[str, torch.Tensor]
Piece = list[tuple[str, slice]]
"""Neighbouring columns of the model as one vector: whole small parameters, or a part of a large one."""

_ROUNDING = 4.0 * float(torch.finfo(torch.float32).eps)
_SUMMED = 16
"""Rows that are combined at a time, in float32 where that pays; sums of these go to float64."""
EXACT_NUMBERS = 1 << 18
"""With at most so many numbers float64 costs nothing worth saving."""
_SMALLEST, _LARGEST = 1e-20, 1e20


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

    def gram(self, names: Sequence[str] | None = None, *, single: bool = False) -> torch.Tensor:
        """Return the rows' inner products over some parameters (all by default), shape (rows, rows), float64.

        Args:
            names: The parameters.
            single: Whether blocks may be multiplied in float32, where that neither over- nor underflows; see
                :meth:`blocks`.
        """
        products = zeros(len(self), len(self))
        for _, block in self.blocks(names, single=single):
            rows = lent(block)
            products += rows @ rows.T
        found = products.cpu()
        return self.gram(names) if single and self.may_be_single(names) and not in_range(found) else found

    def combined(
        self, coefficients: torch.Tensor, names: Sequence[str] | None = None, *, single: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return ``sum_i coefficients_i row_i`` over some parameters (all by default), float64.

        Args:
            coefficients: Shape (rows,), float64.
            names: The parameters.
            single: See :meth:`sums`.
        """
        chosen = self._names(names)
        result = {name: torch.empty(self.params[name].numel(), dtype=torch.float64) for name in chosen}
        for piece, _, total in self.sums(coefficients, chosen, single=single):
            put(result, piece, total)
        return {name: flat.view(self.params[name].shape) for name, flat in result.items()}

    def moved(self, coefficients: torch.Tensor, *, single: bool = False) -> dict[str, torch.Tensor]:
        """Return ``x + sum_i coefficients_i row_i`` in x's dtypes: :meth:`combined` without a model in float64.

        Args:
            coefficients: Shape (rows,), float64.
            single: See :meth:`sums`.
        """
        result = {name: torch.empty(p.numel(), dtype=p.dtype) for name, p in self.params.items()}
        for piece, x, total in self.sums(coefficients, single=single):
            put(result, piece, total.add_(x))
        return {name: flat.view(self.params[name].shape) for name, flat in result.items()}

    def may_be_single(self, names: Sequence[str] | None = None) -> bool:
        """Whether float32 pays and loses nothing of the numbers as they came: many of them, and none in float64."""
        chosen = [self.params[name] for name in self._names(names)]
        size = sum(p.numel() for p in chosen) * len(self)
        return size > EXACT_NUMBERS and all(p.dtype != torch.float64 for p in chosen)

    def blocks(
        self, names: Sequence[str] | None = None, *, single: bool = False
    ) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield columns and the rows there, shape (rows, columns); the next block takes the memory of the last.

        Args:
            names: The parameters; all by default.
            single: Whether rows are rounded to float32, where :meth:`may_be_single`; float64 otherwise. A difference of
                float32 numbers within a factor of two of each other is exact, any other is rounded once.
        """
        for piece, _, blocks in self._walk(self._names(names), len(self), single=single):
            yield piece, next(blocks)

    def sums(
        self, coefficients: torch.Tensor, names: Sequence[str] | None = None, *, single: bool = False
    ) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
        """Yield columns, x there and ``sum_i coefficients_i row_i`` there, both of shape (columns,).

        Args:
            coefficients: Shape (rows,), float64.
            names: The parameters; all by default.
            single: Whether differences, and sums of at most 16 rows, may be rounded to float32; see :meth:`blocks`.
                More rows are summed in float64, 16 at a time.
        """
        for piece, x, blocks in self._walk(self._names(names), _SUMMED, single=single):
            factors = torch.split(coefficients.to(x.dtype), _SUMMED)
            first, *others = (few @ block for few, block in zip(factors, blocks, strict=True))
            yield piece, x, sum(others, start=first.double()) if others else first

    def _walk(
        self, names: list[str], at_once: int, *, single: bool
    ) -> Iterator[tuple[Piece, torch.Tensor, Iterator[torch.Tensor]]]:
        """Yield columns, x there and the rows there, ``at_once`` at a time."""
        dtype = torch.float32 if single and self.may_be_single(names) else torch.float64
        at_once = min(at_once, len(self))
        room = min(block_columns(at_once), sum(self.params[name].numel() for name in names))
        memory, base = torch.empty(at_once * room, dtype=dtype), torch.empty(room, dtype=dtype)
        params = flat(self.params, names)
        rows = [(flat(y, names), True) for y in self.clients] + [(flat(row, names), False) for row in self.remembered]

        def blocks(piece: Piece, x: torch.Tensor) -> Iterator[torch.Tensor]:
            for first in range(0, len(rows), at_once):
                few = rows[first : first + at_once]
                block = memory[: len(few) * len(x)].view(len(few), len(x))
                for out, (tensors, from_x) in zip(block, few, strict=True):
                    take(tensors, piece, out, x if from_x else None)
                yield block

        for piece, width in pieces(self.params, names, room):
            name, columns = piece[0]
            x = params[name][columns]
            if len(piece) > 1 or x.dtype != dtype:  # else it is there already
                take(params, piece, x := base[:width])
            yield piece, x, blocks(piece, x)

    def _names(self, names: Sequence[str] | None) -> list[str]:
        return list(self.params if names is None else names)


def flat(tensors: Tensors, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return some tensors as vectors, views where they are contiguous and of at least 16 bits."""
    return {name: widened(tensors[name]).flatten() for name in names}


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a dtype that torch can combine with others: float8 in float32, any other as it is."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor


def pieces(params: Tensors, names: Sequence[str], room: int) -> Iterator[tuple[Piece, int]]:
    """Cut parameters into pieces of at most ``room`` columns: yields (piece, its columns)."""
    piece: Piece = []
    width = 0
    for name in names:
        size, start = params[name].numel(), 0
        while start < size:
            end = min(start + room - width, size)
            piece.append((name, slice(start, end)))
            width, start = width + end - start, end
            if width == room:
                yield piece, width
                piece, width = [], 0
    if piece:
        yield piece, width


def take(vectors: Tensors, piece: Piece, out: torch.Tensor, origin: torch.Tensor | None = None) -> None:
    """Copy a piece of some vectors into ``out``, less ``origin`` where it is given; both of shape (columns,)."""
    parts = [vectors[name] for name, _ in piece]
    for end in {0, len(piece) - 1}:  # those between are whole
        parts[end] = parts[end][piece[end][1]]
    whole = parts[0]
    if len(parts) > 1:
        whole = torch.cat(parts, out=out) if whole.dtype == out.dtype else torch.cat(parts)
    if origin is not None:
        torch.sub(whole, origin, out=out)  # in the wider dtype of the two
    elif whole is not out:
        out.copy_(whole)


def put(vectors: Tensors, piece: Piece, values: torch.Tensor) -> None:
    """Write a piece's values, shape (columns,), to where they belong in some vectors."""
    start = 0
    for name, columns in piece:
        width = columns.stop - columns.start
        vectors[name][columns] = values[start : start + width]
        start += width


def rounding_of(params: Tensors, names: Sequence[str] | None = None) -> float:
    """Length below which a displacement of these parameters is float32 noise without a direction, ``4 eps32 |x|``."""
    squares = [float(params[n].double().square().sum()) for n in (params if names is None else names)]
    return _ROUNDING * math.sqrt(math.fsum(squares))


def last_digit_of(params: Tensors, names: Sequence[str]) -> float:
    """Length of what rounding to the parameters' own dtypes changes at most, ``(eps / 2) |x|``."""
    halves = [torch.finfo(params[n].dtype).eps / 2.0 * float(params[n].double().norm()) for n in names]
    return math.hypot(*halves)


def in_range(gram: torch.Tensor) -> bool:
    """Tell whether no float32 product under- or overflowed in these inner products."""
    squares = gram.diagonal()
    return bool(((squares > _SMALLEST) & (squares < _LARGEST)).all())


def has_direction(lengths: torch.Tensor, smallest: float) -> torch.Tensor:
    """Tell rows that have a direction (longer than ``smallest``, and not 0) from those that don't."""
    return (lengths >= smallest) & (lengths > 0.0)
