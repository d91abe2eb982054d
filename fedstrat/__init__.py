"""fedstrat: federated-learning methods as Flower Strategies with their client halves.

Names are imported when first used, so that ``import fedstrat`` stays light: a client answers queries without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(
        ("CRAFT", "SCAFFOLD", "ConFIG", "FedAvg", "FedAvgM", "FedCSPACK", "FedProx", "FedSAM", "FedVSSAM", "MoFedSAM"),
        "fedstrat.strategies",
    ),
    "LocalSession": "fedstrat.local.session",
    "evaluate": "fedstrat.client",
    "load_arrays": "fedstrat.payloads",
    "query": "fedstrat.client",
    "to_arrays": "fedstrat.payloads",
    "train": "fedstrat.client",
}

if TYPE_CHECKING:
    from fedstrat.client import evaluate, query, train
    from fedstrat.local.session import LocalSession
    from fedstrat.payloads import load_arrays, to_arrays
    from fedstrat.strategies import (
        CRAFT,
        SCAFFOLD,
        ConFIG,
        FedAvg,
        FedAvgM,
        FedProx,
        FedSAM,
        FedVSSAM,
        MoFedSAM,
    )

__all__ = [
    "CRAFT", "SCAFFOLD", "ConFIG", "FedAvg", "FedAvgM", "FedCSPACK", "FedProx", "FedSAM", "FedVSSAM", "LocalSession", "MoFedSAM",
    "__version__", "evaluate", "load_arrays", "query", "to_arrays", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fedstrat' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
