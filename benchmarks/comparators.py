"""The comparators on digits, by the protocol of ``benchmarks.digits``: ``python -m benchmarks.comparators``."""

from pathlib import Path

from benchmarks import digits
from benchmarks.selection import Method

LOW, MIDDLE = digits.LOW, digits.MIDDLE
METHODS = (
    Method("FedNova", "fednova", "server-lr", (1.0, 2.0, 4.0), LOW),
    Method("q-FedAvg", "qfedavg", "q", (0.1, 0.5, 1.0), MIDDLE),
    Method("AFL", "afl", "lambda-lr", (0.01, 0.1, 0.5), MIDDLE),
    Method("FedMGDA+", "fedmgdaplus", "server-lr", (0.1, 0.3, 1.0), MIDDLE),
    Method("FedFV", "fedfv", "alpha", (0.1, 0.3, 0.5), MIDDLE),
    Method("FedLF", "fedlf", "server-lr", (0.5, 1.0, 2.0), MIDDLE),
    Method("FedGAMMA", "fedgamma", "server-lr", (1.0, 2.0, 4.0), LOW),
    Method("FedSMOO", "fedsmoo", "lamb", (0.01, 0.1, 0.5), MIDDLE),
    Method("FedACG", "fedacg", "momentum", (0.5, 0.7, 0.85), MIDDLE),
    Method("MOON", "moon", "mu", (0.1, 1.0, 5.0), MIDDLE),
    Method("FedNTD", "fedntd", "beta", (0.1, 0.3, 1.0), MIDDLE),
    Method("Normalised FedAvgM", "normalisedfedavgm", "server-lr", (0.03, 0.1, 0.3), MIDDLE),
)

if __name__ == "__main__":
    digits.METHODS = METHODS
    digits.RESULTS = Path(__file__).parent / "results" / "comparators.json"
    digits.CAPTION = digits.CAPTION.replace("benchmarks.digits", "benchmarks.comparators").replace(
        "digits.json", "comparators.json"
    )
    digits.main()
