"""Which Flower this works with, checked before anything of Flower is imported."""

import re
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = "flwr>=1.32,<2"


def check_flower() -> None:
    """Refuse an installed Flower that is too old or too new. The mathematics does without Flower, so none is no error.

    Raises:
        ImportError: The installed version isn't supported.
    """
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        return
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None or not (1, 32) <= (int(numbers[1]), int(numbers[2])) < (2, 0):
        raise ImportError(f"fedstrat needs {SUPPORTED}, but flwr {installed} is installed; pip install '{SUPPORTED}'")
