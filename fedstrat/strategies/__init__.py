"""One file per algorithm, both halves. ALGORITHMS is the explicit table of them."""

from typing import Any, NamedTuple

from fedstrat.local.rule import LocalRule
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.config import ConFIG
from fedstrat.strategies.craft import CRAFT
from fedstrat.strategies.fedavg import FedAvg, FedAvgRule
from fedstrat.strategies.fedavgm import FedAvgM
from fedstrat.strategies.fedcspack import FedCSPACK, FedCSPACKRule
from fedstrat.strategies.fedprox import FedProx, FedProxRule
from fedstrat.strategies.fedsam import FedSAM, FedSAMRule
from fedstrat.strategies.fedvssam import FedVSSAM, FedVSSAMRule
from fedstrat.strategies.mofedsam import MoFedSAM, MoFedSAMRule
from fedstrat.strategies.scaffold import SCAFFOLD, ScaffoldRule


class Algorithm(NamedTuple):
    """The two halves of an algorithm."""

    strategy: type[FedStrategy[Any, Any]]
    rule: type[LocalRule[Any, Any]]


ALGORITHMS: dict[str, Algorithm] = {
    "fedavg": Algorithm(FedAvg, FedAvgRule),
    "fedavgm": Algorithm(FedAvgM, FedAvgRule),
    "fedprox": Algorithm(FedProx, FedProxRule),
    "scaffold": Algorithm(SCAFFOLD, ScaffoldRule),
    "craft": Algorithm(CRAFT, FedAvgRule),
    "config": Algorithm(ConFIG, FedAvgRule),
    "fedsam": Algorithm(FedSAM, FedSAMRule),
    "mofedsam": Algorithm(MoFedSAM, MoFedSAMRule),
    "fedvssam": Algorithm(FedVSSAM, FedVSSAMRule),
    "fedcspack": Algorithm(FedCSPACK, FedCSPACKRule),
}
"""Name in the run config and on the wire -> the two halves. Your own algorithm joins it by assignment."""

__all__ = [
    "ALGORITHMS", "CRAFT", "SCAFFOLD", "Algorithm", "ConFIG", "FedAvg", "FedAvgM", "FedProx", "FedSAM",
    "FedStrategy", "FedVSSAM", "MoFedSAM",
]  # fmt: skip
