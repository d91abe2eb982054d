"""Where local training runs, and with how many threads."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fedstrat.errors import ConfigError


def choose_device(name: str, key: str = "train.device") -> torch.device:
    """Return the device of that name: "auto" takes CUDA when present (as Ray assigned it), else the CPU.

    Args:
        name: "auto", "cpu", "cuda", "cuda:N", or another one of torch.
        key: The setting that asks for it.

    Raises:
        ConfigError: The device isn't there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{key}: expected 'auto', 'cpu', 'cuda' or 'cuda:N', but got '{name}'") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"{key}: '{name}' was asked for, but this machine has {torch.cuda.device_count()} CUDA devices;"
            " use 'auto' or 'cpu'"
        )
    return device


def place(model: torch.nn.Module, run_config: Mapping[str, Any]) -> None:
    """Put a model where ``train.device`` says, laid out and compiled as ``train.channels-last``, ``train.compile`` say.

    Compiling is in place: parameters, their names and the module stay the same. It happens in the first passes, again
    for other shapes, and rounds otherwise than eager mode.

    Raises:
        ConfigError: The device isn't there.
    """
    if "train.device" in run_config:
        model.to(choose_device(str(run_config["train.device"])))
    if run_config.get("train.channels-last", False):
        model.to(memory_format=torch.channels_last)
    if run_config.get("train.compile", False):
        model.compile()


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
