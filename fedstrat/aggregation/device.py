"""Where inner products of updates are worked out.

They are what grows with the square of the cohort, m^2 d; everything else in a step reads its numbers once and is over
before they would have reached another device. So blocks of updates are lent there one at a time, multiplied in float64,
and the m x m products come back; memory there doesn't grow with the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_CPU = torch.device("cpu")
_device: ContextVar[torch.device] = ContextVar("_device", default=_CPU)


@contextmanager
def products_on(device: torch.device) -> Iterator[None]:
    """Work out inner products on this device, in this thread."""
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


def zeros(*shape: int) -> torch.Tensor:
    """Return where products are added up, float64."""
    return torch.zeros(shape, dtype=torch.float64, device=_device.get())


def lent(block: torch.Tensor) -> torch.Tensor:
    """Return numbers where they are multiplied: as they are on the CPU, elsewhere in float64.

    A GPU rounds float32 products to TF32 where somebody allowed that, and has them in float64 before the next block is
    there.
    """
    device = _device.get()
    return block if device == _CPU else block.to(device).double()
