"""Where local training runs, and with how many threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedstrat.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """Return the device for ``train.device``: "auto" takes CUDA when present (as Ray assigned it), else the CPU.

    Raises:
        ConfigError: The device isn't there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"train.device: expected 'auto', 'cpu', 'cuda' or 'cuda:N', but got '{name}'") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"train.device: '{name}' was asked for, but this machine has {torch.cuda.device_count()} CUDA devices;"
            " use 'auto' or 'cpu'"
        )
    return device


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Fix the number of torch threads, so that results don't depend on how many workers share the machine."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count:
            torch.set_num_threads(before)
