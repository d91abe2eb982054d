"""The line that a round prints: plain ASCII in columns, no control codes."""

from fedstrat.metrics.fairness import Fairness
from fedstrat.metrics.rounds import RoundReport


class Progress:
    """Prints a line per round with the time that is left, guessed from the rounds so far."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def line(self, report: RoundReport) -> str:
        """The line of a finished round; call it once per round, in order."""
        self._seconds.append(report.seconds)
        # The first round also starts the engine, which says nothing about the others.
        told = self._seconds[1:]
        left = sum(told) / len(told) * (report.num_rounds - report.round) if told else None
        return round_line(report, seconds_left=left)


def round_line(report: RoundReport, *, seconds_left: float | None = None) -> str:
    """Describe a finished round in one line.

    For example ``round  3/30  loss  0.734  acc mean .801  best10 .990  worst10 .402  std .154  train up
    1.2 MB  down   1.2 MB    0.8 s  left 21 s``. Scores that were told in training are those of the model before it, and
    say so. The bytes are those of training on the wire, from and to all clients together, and for methods that send
    less than the model their payload's share of FedAvg's; what evaluation moved is in the history.

    Args:
        report: The round.
        seconds_left: Seconds until the run ends, if known.
    """
    width = len(str(report.num_rounds))
    parts: list[str] = [
        f"round {report.round:{width}}/{report.num_rounds}",
        _scores(report.fairness or report.received),
        *([] if report.fairness or not report.received else [f"(of round {report.round - 1})"]),
        *([] if report.personal is None else _personal(report.fairness, report.personal)),
        *([] if report.elsewhere is None else [f"elsewhere {_share(report.elsewhere.mean)}"]),
        f"train up {format_bytes(report.traffic.train_up_wire):>8}",
        f"down {format_bytes(report.traffic.train_down_wire):>8}",
        *_saved(report),
        f"{report.seconds:5.1f} s",
    ]
    if seconds_left is not None:
        parts.append(f"left {format_seconds(seconds_left):<10}")
    if not report.aggregated:
        parts.append("no update: too few usable replies")
    if report.failed:
        parts.append(f"failed {len(report.failed)}")
    return "  ".join(parts).rstrip()


def _scores(fairness: Fairness | None) -> str:
    if fairness is None:
        return f"{'not evaluated':<63}"
    return (
        f"loss {fairness.loss:6.3f}  acc mean {_share(fairness.mean)}  best10 {_share(fairness.best10)}"
        f"  worst10 {_share(fairness.worst10)}  std {_share(fairness.std)}"
    )


def _personal(fairness: Fairness | None, own: Fairness) -> list[str]:
    """Both models' worst clients, and the personal models' scores."""
    return [
        *([] if fairness is None else [f"worst {_share(fairness.worst)}"]),
        f"personal mean {_share(own.mean)}  worst10 {_share(own.worst10)}  worst {_share(own.worst)}",
    ]


def _saved(report: RoundReport) -> list[str]:
    """Bytes of training beside FedAvg's, for methods that send less."""
    traffic = report.traffic
    moved = traffic.train_up_payload + traffic.train_down_payload
    if report.personal is None or not 0 < moved < traffic.train_dense_payload:
        return []
    return [
        f"of FedAvg's {format_bytes(traffic.train_dense_payload)}: {100 * moved / traffic.train_dense_payload:.1f} %"
    ]


def format_bytes(count: int) -> str:
    """A byte count in decimal units: ``format_bytes(1_234_567) == "1.2 MB"``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.95:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def format_seconds(seconds: float) -> str:
    """A duration in the two units that matter: ``21 s``, ``3 min 20 s``, ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _share(value: float) -> str:
    """Three decimals without the leading zero, four characters wide: ``.801``, ``1.00``."""
    text = f"{value:.3f}"
    return text[1:] if text.startswith("0") else text[:4]
