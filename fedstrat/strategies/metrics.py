"""Flower's view of a run's numbers: MetricRecords, and the lines of its log."""

import logging
from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result

from fedstrat.metrics.fairness import Fairness
from fedstrat.strategies import intake
from fedstrat.strategies.arguments import CommonArguments

logger = logging.getLogger("flwr")


def fairness_metrics(f: Fairness, prefix: str = "") -> Mapping[str, float]:
    """The fairness numbers under their names in a MetricRecord; ``prefix`` is "personal-" for personal models."""
    return {
        f"{prefix}loss": f.loss,
        f"{prefix}accuracy": f.accuracy,
        f"{prefix}accuracy-mean": f.mean,
        f"{prefix}accuracy-best10": f.best10,
        f"{prefix}accuracy-worst10": f.worst10,
        f"{prefix}accuracy-std": f.std,
    }


def mean_record(contents: list[RecordDict], weight_key: str) -> MetricRecord:
    """Example-weighted mean of every metric."""
    return MetricRecord(intake.mean_metrics(contents, weight_key))


def log_summary(common: CommonArguments, name: str, own: Mapping[str, Any]) -> None:
    """Log a strategy's settings in the layout of Flower's own summary."""
    logger.info("\t├──> Sampling:")
    logger.info("\t│\t├──Fraction: train (%.2f) | evaluate ( %.2f)", common.fraction_train, common.fraction_evaluate)
    logger.info("\t│\t├──Minimum nodes: train (%d) | evaluate (%d)", common.min_train_nodes, common.min_evaluate_nodes)
    logger.info("\t│\t└──Minimum available nodes: %d", common.min_available_nodes)
    logger.info("\t├──> Keys in records:")
    logger.info("\t│\t├── Weighted by: '%s'", common.weighted_by_key)
    logger.info("\t│\t├── ArrayRecord key: '%s'", common.arrayrecord_key)
    logger.info("\t│\t└── ConfigRecord key: '%s'", common.configrecord_key)
    logger.info("\t└──> %s: %s", name, ", ".join(f"{key}={value}" for key, value in own.items()))


def log_start(num_rounds: int, arrays: ArrayRecord, train_config: ConfigRecord, evaluate_config: ConfigRecord) -> None:
    """Log what a run begins with, as Flower's own ``start`` does."""
    megabytes = sum(len(array.data) for array in arrays.values()) / 1024**2
    logger.info("\t├── Number of rounds: %d", num_rounds)
    logger.info("\t├── ArrayRecord (%.2f MB)", megabytes)
    for phase, config in (("train", train_config), ("evaluate", evaluate_config)):
        entries = ", ".join(f"'{k}': {'<bytes>' if isinstance(v, bytes) else v}" for k, v in config.items())
        logger.info("\t├── ConfigRecord (%s): %s", phase, f"{{{entries}}}" if entries else "(empty!)")


def log_end(seconds: float, result: Result) -> None:
    """Log what a run ends with, as Flower's own ``start`` does."""
    logger.info("")
    logger.info("Strategy execution finished in %.2fs", seconds)
    logger.info("")
    logger.info("Final results:")
    logger.info("")
    for line in str(result).splitlines():
        logger.info("\t%s", line)
    logger.info("")
