"""What the rounds of a run come to."""

from collections.abc import Iterable, Mapping
from typing import Any

SCORES = ("loss", "mean", "accuracy", "best10", "worst10", "std")
"""The numbers about a model in a line of the history, each null in a round without evaluation."""


def summarise(history: Iterable[Mapping[str, Any]], target: float = 0.0) -> dict[str, Any]:
    """Sum up the lines of a history.

    Args:
        history: Lines of ``history.jsonl``, in order.
        target: Mean client accuracy in (0, 1] whose first round is looked for; 0: none.

    Returns:
        Counts of rounds, the scores of the last evaluation (``final``) and of the one with the highest mean
        accuracy (``best``, the first of equals), when ``target`` was reached, bytes and seconds.
    """
    lines = list(history)
    scored = [line for line in lines if line["mean"] is not None]
    best = max(scored, key=lambda line: (line["mean"], -line["round"]), default=None)
    reached = next((line for line in scored if target and line["mean"] >= target), None)
    return {
        "rounds": len(lines),
        "rounds_succeeded": sum(line["aggregated"] for line in lines),
        "rounds_failed": sum(not line["aggregated"] for line in lines),
        "final": _scores(scored[-1]) if scored else None,
        "best": _scores(best) if best else None,
        "personal": scored[-1].get("personal") if scored else None,
        "personal_elsewhere": scored[-1].get("personal_elsewhere") if scored else None,
        "target_accuracy": target or None,
        "rounds_to_target": reached["round"] if reached else None,
        "bytes_to_target": reached["total_bytes"] if reached else None,
        "bytes": lines[-1]["total_bytes"] if lines else None,
        "seconds": lines[-1]["total_seconds"] if lines else 0.0,
    }


def _scores(line: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: line[name] for name in ("round", *SCORES)}, "worst": line.get("worst")}
