"""Which groups may be ranked: only those on equal data, shared out alike, after as many rounds."""

import json
from collections.abc import Sequence

from fedstrat.page.gather import IGNORED, Group

BASIS = ("data set", "partition", "number of rounds")


def comparable(groups: Sequence[Group]) -> list[list[Group]]:
    """Sort groups into those with equal data set, partition and number of rounds, in the order of the first of each."""
    found: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        found.setdefault(_basis(group), []).append(group)
    return list(found.values())


def unlike(groups: Sequence[Group]) -> list[str]:
    """Return in which of :data:`BASIS` the groups differ."""
    columns = zip(*(_basis(group) for group in groups), strict=True)
    return [name for name, values in zip(BASIS, columns, strict=True) if len(set(values)) > 1]


def basis_in_words(group: Group, among: Sequence[str] = BASIS) -> str:
    """Say what a group may be compared on, such as "digits, iid partition, 10 rounds"."""
    data, _, rounds = _basis(group)
    words = (data, f"{group.config.get('dataset.partition')} partition", f"{rounds} rounds")
    return ", ".join(word for name, word in zip(BASIS, words, strict=True) if name in among)


def _basis(group: Group) -> tuple[str, str, str]:
    config = group.config
    partition = {n: v for n, v in config.items() if n.startswith("dataset.") and n not in IGNORED}
    partition = {**partition, "num-clients": config.get("num-clients"), "dataset.name": ""}
    # A run that was cut off stands where it was; one that reached its goal early has had all it wanted.
    rounds = {
        config.get("num-server-rounds") if run.complete or not run.history else run.history[-1]["round"]
        for run in group.runs
    }
    told = " or ".join(sorted(map(str, rounds)))
    return str(config.get("dataset.name", "")), json.dumps(partition, sort_keys=True, default=str), told
