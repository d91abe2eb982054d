"""Displacements rounded to 16 bits, which clients may send in place of their models (``update_dtype``).

    client   d_i = round(y_i - x)     every entry to the nearest number of the dtype; x as it was received
    server   y_i = x + d_i            in x's dtype, before anything else sees the reply

Errors of an entry of d_i, beside those of x's own dtype:

    bfloat16   at most 2^-8 |y - x|; its range is float32's
    float16    at most 2^-11 |y - x| from 2^-14 (6.1e-5) to 65504, and at most 2^-25 (3.0e-8) below; beyond 65504 the
               client refuses

So entries that hardly move are better off in bfloat16: in float16 one that moves by less than 3.0e-8 stands still.
"""

import torch
from flwr.app import ArrayRecord

from fedstrat.errors import PayloadError
from fedstrat.payloads import Params, check_like, decode, is_finite, state_dtype

RECORD = "delta"
"""The record of displacements, one per trainable parameter, of our own serialisation type."""


def rounded(y: Params, x: Params, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return ``round(y - x)`` in ``dtype``, one tensor per parameter of ``y``.

    Raises:
        PayloadError: An entry moved beyond the range of ``dtype``.
    """
    deltas = {}
    for name, after in y.items():
        exact = after.detach().to(state_dtype(after)) - x[name].to(state_dtype(after))
        deltas[name] = delta = exact.to(dtype)
        if not is_finite(delta) and is_finite(exact):
            furthest, limit = exact.abs().max().item(), torch.finfo(dtype)
            raise PayloadError(
                f"{RECORD}/{name}: an entry moved by {furthest:.3g}, but {limit.dtype} ends at {limit.max:g}; set"
                " update-dtype to 'model', or lower the learning rate"
            )
    return deltas


def restored(x: Params, delta: Params) -> dict[str, torch.Tensor]:
    """Return ``x + d`` in x's dtypes and order."""
    # Widened first: a sum of two dtypes takes several times as long, and torch has none with float8.
    return {n: delta[n].to(state_dtype(b), copy=True).add_(b.to(state_dtype(b))).to(b.dtype) for n, b in x.items()}


def read(record: ArrayRecord, x: Params, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Decode a client's displacements and return ``y_i = x + d_i``.

    Raises:
        PayloadError: Names, shapes or dtype differ from those of ``x`` and ``dtype``, or y_i isn't finite.
    """
    delta = decode(record, RECORD)
    like = {n: torch.empty_like(before, dtype=dtype, device="meta") for n, before in x.items()}
    check_like(delta, like, RECORD, owner="the global model")
    y = restored(x, delta)
    check_like(y, x, RECORD, owner="the global model", finite=True)
    return y
