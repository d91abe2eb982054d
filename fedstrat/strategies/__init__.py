"""One file per algorithm, both halves. ALGORITHMS is the explicit table of them."""

from typing import Any, NamedTuple

from fedstrat.local.rule import LocalRule
from fedstrat.strategies.afl import AFL, AFLRule
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.config import ConFIG
from fedstrat.strategies.craft import CRAFT
from fedstrat.strategies.ditto import Ditto, DittoRule
from fedstrat.strategies.fedacg import FedACG, FedACGRule
from fedstrat.strategies.fedavg import FedAvg, FedAvgRule
from fedstrat.strategies.fedavgm import FedAvgM
from fedstrat.strategies.fedcspack import FedCSPACK, FedCSPACKRule
from fedstrat.strategies.fedfv import FedFV, FedFVRule
from fedstrat.strategies.fedgamma import FedGAMMA, FedGAMMARule
from fedstrat.strategies.fedlf import FedLF, FedLFRule
from fedstrat.strategies.fedmgdaplus import FedMGDAPlus
from fedstrat.strategies.fednova import FedNova, FedNovaRule
from fedstrat.strategies.fedntd import FedNTD, FedNTDRule
from fedstrat.strategies.fedprox import FedProx, FedProxRule
from fedstrat.strategies.fedsam import FedSAM, FedSAMRule
from fedstrat.strategies.fedsmoo import FedSMOO, FedSMOORule
from fedstrat.strategies.fedspu import FedSPU, FedSPURule
from fedstrat.strategies.fedvssam import FedVSSAM, FedVSSAMRule
from fedstrat.strategies.mofedsam import MoFedSAM, MoFedSAMRule
from fedstrat.strategies.moon import MOON, MOONRule
from fedstrat.strategies.normalisedfedavgm import NormalisedFedAvgM
from fedstrat.strategies.qfedavg import QFedAvg, QFedAvgRule
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
    "ditto": Algorithm(Ditto, DittoRule),
    "fedcspack": Algorithm(FedCSPACK, FedCSPACKRule),
    "fedmgdaplus": Algorithm(FedMGDAPlus, FedAvgRule),
    "fedfv": Algorithm(FedFV, FedFVRule),
    "fedlf": Algorithm(FedLF, FedLFRule),
    "moon": Algorithm(MOON, MOONRule),
    "fedntd": Algorithm(FedNTD, FedNTDRule),
    "fednova": Algorithm(FedNova, FedNovaRule),
    "qfedavg": Algorithm(QFedAvg, QFedAvgRule),
    "afl": Algorithm(AFL, AFLRule),
    "fedacg": Algorithm(FedACG, FedACGRule),
    "fedgamma": Algorithm(FedGAMMA, FedGAMMARule),
    "fedsmoo": Algorithm(FedSMOO, FedSMOORule),
    "fedspu": Algorithm(FedSPU, FedSPURule),
    "normalisedfedavgm": Algorithm(NormalisedFedAvgM, FedAvgRule),
}
"""Name in the run config and on the wire -> the two halves. Your own algorithm joins it by assignment."""

__all__ = [
    "AFL",
    "ALGORITHMS",
    "CRAFT",
    "MOON",
    "SCAFFOLD",
    "Algorithm",
    "ConFIG",
    "Ditto",
    "FedACG",
    "FedAvg",
    "FedAvgM",
    "FedCSPACK",
    "FedFV",
    "FedGAMMA",
    "FedLF",
    "FedMGDAPlus",
    "FedNTD",
    "FedNova",
    "FedProx",
    "FedSAM",
    "FedSMOO",
    "FedSPU",
    "FedStrategy",
    "FedVSSAM",
    "MoFedSAM",
    "NormalisedFedAvgM",
    "QFedAvg",
]
