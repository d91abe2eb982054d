"""fedstrat: federated-learning methods as Flower Strategies with their client halves.

Names are imported when first used, so that ``import fedstrat`` stays light: a client answers queries without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedstrat.versions import check_flower

if TYPE_CHECKING:
    from fedstrat.client import evaluate as evaluate
    from fedstrat.client import query as query
    from fedstrat.client import train as train
    from fedstrat.local.session import LocalSession as LocalSession
    from fedstrat.payloads import load_arrays as load_arrays
    from fedstrat.payloads import to_arrays as to_arrays
    from fedstrat.strategies import *  # noqa: F403 - its __all__ is static

__version__ = "0.1.0"

check_flower()

_HOME = {
    "LocalSession": "fedstrat.local.session",
    "evaluate": "fedstrat.client",
    "load_arrays": "fedstrat.payloads",
    "query": "fedstrat.client",
    "to_arrays": "fedstrat.payloads",
    "train": "fedstrat.client",
}
"""Where a public name lives; all others are strategies."""


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        module = importlib.import_module(_HOME.get(name, "fedstrat.strategies"))
        if name in _HOME or name in module.__all__:
            value = getattr(module, name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'fedstrat' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*_HOME, *importlib.import_module("fedstrat.strategies").__all__, "__version__"])
