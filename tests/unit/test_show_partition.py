"""``fedstrat partition``: the numbers of the table, the picture, and the same partition that a run uses."""

import csv
import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from typer.testing import CliRunner

from fedstrat.cli import app
from fedstrat.data.clients import assign
from fedstrat.data.heterogeneity import holdings
from fedstrat.data.protocols import Share, share_out
from fedstrat.data.sources import load
from fedstrat.errors import ConfigError, DataError
from fedstrat.runs.config import defaults, parse
from fedstrat.runs.partition import EXTREMES, draw_partition, show_partition, table

LABELS = np.array([0, 0, 0, 1, 1, 2, 2, 2])


def share(train, test=()):
    return Share(np.array(train, dtype=np.int64), np.array(test, dtype=np.int64))


def test_numbers_by_hand():
    # Labels of the training parts: client 0 has 0 0 1, client 1 has 2 2 2 (sample 5 twice), client 2 nothing.
    held = holdings(LABELS, [share([0, 1, 3], [4]), share([5, 5, 6]), share([])], 4)
    assert held.train.tolist() == [[2, 1, 0, 0], [0, 0, 3, 0], [0, 0, 0, 0]]
    assert held.test.tolist() == [[0, 1, 0, 0], [0] * 4, [0] * 4]
    assert (held.unused, held.repeated) == (2, 1)  # samples 2 and 7; sample 5
    assert held.sizes.tolist() == [3, 3, 0]
    assert held.num_labels.tolist() == [2, 1, 0]
    first = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    np.testing.assert_allclose(held.entropy, [first, 0, math.nan])
    # All together: 2 1 3 of 6. Client 0: |4-2| + |2-1| + |0-3| sixths, halved; client 1: 2 + 1 + 3 sixths, halved.
    np.testing.assert_allclose(held.distance, [0.5, 0.5, math.nan])
    assert str(held.entropy[1]) == "0.0"  # not minus zero


def test_distance_is_zero_for_equal_mixes_and_near_one_for_a_rare_label_alone():
    held = holdings(np.arange(20) % 2, [share(range(10)), share(range(10, 20))], 2)
    assert held.distance.tolist() == [0, 0]
    assert held.entropy == pytest.approx([math.log(2)] * 2)
    alone = holdings(np.array([0] * 99 + [1]), [share(range(99)), share([99])], 2)
    assert alone.distance == pytest.approx([0.01, 0.99])


def test_the_command_shows_the_partition_of_a_run(tmp_path):
    pairs = "num-clients=12 dataset.alpha=0.3 seed=5"
    result = CliRunner().invoke(app, ["partition", "-c", pairs, "--out", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "digits, partition dirichlet, 12 clients, seed 5"
    assert "every sample is held" in lines[1]
    run = defaults() | {"num-clients": 12, "dataset.alpha": 0.3, "seed": 5}
    with (tmp_path / "new" / "partition.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    y = load("digits").y
    for client, row in enumerate(rows):
        own = assign(run, {"partition-id": client, "num-partitions": 12})
        assert [int(row[f"label_{k}"]) for k in range(10)] == np.bincount(y[own.train], minlength=10).tolist()
        assert (int(row["train"]), int(row["test"])) == (len(own.train), len(own.test))
        words = next(line for line in lines if line.split()[:1] == [str(client)]).split()
        assert words[1:4] == [row["train"], row["test"], row["labels"]]
        assert float(words[4]) == pytest.approx(float(row["entropy"]), abs=1e-3)
        assert float(words[5]) == pytest.approx(float(row["distance"]), abs=1e-3)
    assert len(rows) == 12
    assert lines[-2:] == [str(tmp_path / "new" / name) for name in ("partition.png", "partition.csv")]
    assert imread(tmp_path / "new" / "partition.png").std() > 0.1
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["partition.csv", "partition.png"]


def test_of_many_clients_the_extremes_are_listed():
    labels = np.arange(3000) % 10
    shares = share_out(labels, 200, "dirichlet", alpha=0.1, seed=1)
    held = holdings(labels, shares, 10)
    lines = table(held)
    places = {line: place for place, line in enumerate(lines) if line.endswith(":")}
    assert list(places) == ["smallest:", "largest:", "farthest from all:", "nearest to all:"]
    chosen = {name: [int(line.split()[0]) for line in lines[p + 1 : p + 1 + EXTREMES]] for name, p in places.items()}
    assert sorted(held.sizes[chosen["smallest:"]]) == sorted(held.sizes)[:EXTREMES]
    assert sorted(held.sizes[chosen["largest:"]]) == sorted(held.sizes)[-EXTREMES:]
    distance = held.distance[~np.isnan(held.distance)]
    assert sorted(held.distance[chosen["farthest from all:"]]) == sorted(distance)[-EXTREMES:]
    assert sorted(held.distance[chosen["nearest to all:"]]) == sorted(distance)[:EXTREMES]
    assert len(lines) == 8 + 4 * (EXTREMES + 1)
    assert f"{held.sizes.mean():.4g}" in next(line for line in lines if line.startswith("train samples"))


@pytest.mark.parametrize(("num_clients", "num_labels"), [(1, 1), (3, 2), (100, 15), (101, 62), (1000, 10)])
def test_every_size_is_drawn_without_a_warning(tmp_path, num_clients, num_labels):
    labels = np.arange(20 * num_clients) % num_labels
    held = holdings(labels, share_out(labels, num_clients, "quantity", alpha=0.5, seed=2), num_labels)
    figure = draw_partition(held, "a title")
    assert isinstance(figure, Figure)
    figure.savefig(tmp_path / "picture.png", dpi=40)


def test_bars_end_at_the_counts_and_mixes_at_one():
    held = holdings(LABELS, [share([0, 1, 3]), share([5, 6, 7]), share([])], 3)
    top, bottom = draw_partition(held).axes[:2]
    assert [patch.get_data().values.tolist() for patch in top.patches] == [[2, 0, 0], [3, 0, 0], [3, 3, 0]]
    assert [patch.get_data().baseline.tolist() for patch in top.patches] == [[0, 0, 0], [2, 0, 0], [3, 0, 0]]
    np.testing.assert_allclose(bottom.patches[-1].get_data().values, [1, 1, 0])


def test_empty_clients_are_warned_of():
    lines = show_partition(["num-clients=200 dataset.min-size=0 dataset.alpha=0.01"]).splitlines()
    empty = int(lines[-1].split()[1])
    assert lines[-1].startswith(f"warning: {empty} of 200 clients have no training samples")
    y = load("digits").y
    parts = share_out(y, 200, "dirichlet", alpha=0.01, min_size=0, seed=1)
    assert empty == sum(len(part.train) == 0 for part in parts) > 0
    assert "nan" in lines[-1]
    assert not any("warning" in line for line in show_partition(["num-clients=5"]).splitlines())


def test_what_is_held_back_for_validation_is_not_shown_as_training_data():
    settings = "num-clients=4 dataset.alpha=0.5"
    plain = show_partition([settings]).splitlines()
    lines = show_partition([f"{settings} dataset.validation-fraction=0.25"]).splitlines()
    run = parse({"num-clients": 4, "dataset.alpha": 0.5, "dataset.validation-fraction": 0.25}).flat
    clients = [assign(run, {"partition-id": i, "num-partitions": 4}) for i in range(4)]
    train, test, validation = (
        sum(len(getattr(client, part)) for client in clients) for part in ("train", "test", "validation")
    )
    assert lines[1] == (
        f"{train} training and {test} test samples with 10 labels; {validation} samples are held back for validation;"
        " every sample is held"
    )
    assert plain[1].startswith(f"{train + validation} training and {test} test samples with 10 labels; every")
    assert [int(line.split()[1]) for line in lines[-4:]] == [len(client.train) for client in clients]


def test_a_wrong_request_is_one_error(tmp_path):
    with pytest.raises(ConfigError, match="num-clients=0: expected 1 or more"):
        show_partition(["num-clients=0"])
    with pytest.raises(ConfigError, match=r"expected 'dataset.alpha'"):
        show_partition(["dataset.alpha=-1"])
    with pytest.raises(DataError, match="partition 'natural' needs data that say who"):
        show_partition(["dataset.partition=natural"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out .*file: can't write there"):
        show_partition(["num-clients=3"], out=tmp_path / "file")
