"""Who held which classes: worked out anew from a run config, where the data is at hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedstrat.data import sources
from fedstrat.data.clients import assign
from fedstrat.errors import FedstratError
from fedstrat.page import charts
from fedstrat.page.gather import Group

MOST_PICTURES = 4


def label_counts(config: Mapping[str, Any]) -> np.ndarray:
    """Count samples per class and client, training and test parts together, shape (classes, clients).

    Raises:
        LookupError: The run config doesn't decide the partition, or its data isn't here; says which.
        FedstratError: The data can't be read, or can't be shared out so.
    """
    clients, name = config.get("num-clients"), str(config.get("dataset.name"))
    if not isinstance(clients, int) or clients < 1:
        raise LookupError("num-clients is 0, so the partition depended on the nodes that were connected")
    directory = str(config.get("dataset.dir", ""))
    if not sources.at_hand(name, directory):
        where = sources.folder(name, directory)
        raise LookupError(f"the data set '{name}' isn't complete in {where}, and nothing is fetched for a picture")
    columns = []
    for client in range(clients):
        own = assign(config, {"partition-id": client, "num-partitions": clients})
        held = np.concatenate([own.train, own.test])
        columns.append(np.bincount(own.source.y[held], minlength=own.source.num_classes))
    return np.stack(columns, axis=1)


def pictures(groups: Sequence[Group]) -> tuple[list[charts.Chart], list[str]]:
    """Draw every distinct partition of the groups' first runs; returns the pictures and what was left out, and why."""
    distinct: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups:
        config = group.config
        deciding = {n: v for n, v in config.items() if n.startswith("dataset.") and n != "dataset.dir"}
        distinct.setdefault((config.get("num-clients"), config.get("seed"), str(deciding)), []).append(group)
    drawn: list[charts.Chart] = []
    left_out: list[str] = []
    for some in distinct.values():
        config = some[0].config
        name = f"{config.get('dataset.name')}, {config.get('dataset.partition')} partition, seed {config.get('seed')}"
        if len(drawn) == MOST_PICTURES:
            left_out.append(f"{name}: only the first {MOST_PICTURES} partitions are drawn.")
            continue
        try:
            counts = label_counts(config)
        except (FedstratError, LookupError, OSError, ImportError, ValueError, TypeError) as error:
            left_out.append(f"{name}: left out, {str(error).rstrip('.')}.")
            continue
        sizes, classes = counts.sum(axis=0), np.median((counts > 0).sum(axis=0))
        caption = (
            f"{counts.shape[1]} clients hold {sizes.min()} to {sizes.max()} samples (median {np.median(sizes):.0f}),"
            f" test data included; the median client holds {classes:.0f} of {len(counts)} classes."
            " Empty: no sample. Worked out from the run config."
        )
        drawn.append(charts.labels(counts, name, caption))
    return drawn, left_out
