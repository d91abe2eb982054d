"""Sets of the Hugging Face hub, with a stand-in for the package: what is written, once, and what is said without it."""

import gzip
import sys
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from fedstrat.data.protocols import share_out
from fedstrat.data.sources import Reading, load
from fedstrat.data.text import Coding, hashed
from fedstrat.errors import DataError

FEMNIST = [
    {"image": Image.new("L", (28, 28), i), "character": i % 62, "writer_id": f"f{i % 3:04d}_4{i % 3}", "hsf_id": 0}
    for i in range(70)
]
DBPEDIA = {
    "train": [{"label": i % 14, "title": f"Title {i}", "content": ' A "quoted", text\n here.'} for i in range(28)],
    "test": [{"label": 13, "title": "Last", "content": "word"}],
}


@pytest.fixture
def hub(monkeypatch):
    """A package ``datasets`` that holds two small sets and counts how often it is asked."""
    asked = []

    def load_dataset(kind, split):
        asked.append((kind, split))
        return {"flwrlabs/femnist": {"train": FEMNIST}, "fancyzhx/dbpedia_14": DBPEDIA}[kind][split]

    package = ModuleType("datasets")
    package.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", package)
    return asked


def test_femnist_is_fetched_once_and_knows_its_writers(tmp_path, hub):
    source = load("femnist", str(tmp_path))
    assert hub == [("flwrlabs/femnist", "train")]
    np.testing.assert_array_equal(source.x, np.broadcast_to(np.arange(70)[:, None, None, None], (70, 1, 28, 28)))
    np.testing.assert_array_equal(source.y, np.arange(70) % 62)
    np.testing.assert_array_equal(source.groups, np.arange(70) % 3)
    assert (source.num_classes, source.num_train, source.mean) == (62, 70, (0.1307,))
    assert load("femnist", str(tmp_path)) is source
    assert sorted(path.name for path in tmp_path.iterdir()) == [".download.lock", "train.npz"]
    shares = share_out(source.y, 3, "craft", groups=source.groups)
    assert sorted(len(share.train) for share in shares) == [18, 18, 19]  # 80 % of 23, 23 and 24


def test_dbpedia14_is_fetched_once_in_its_own_columns(tmp_path, hub):
    reading = Reading(Coding(vocab_size=500, max_length=6))
    source = load("dbpedia14", str(tmp_path), reading)
    assert hub == [("fancyzhx/dbpedia_14", "test"), ("fancyzhx/dbpedia_14", "train")]
    assert source.y.tolist() == [*(i % 14 for i in range(28)), 13]
    assert (source.num_train, source.num_classes) == (28, 14)
    assert source.x[0].tolist() == [hashed(word, 500) for word in ("title", "0", "a", "quoted", "text", "here")]
    with gzip.open(tmp_path / "train.csv.gz", "rt") as stream:
        assert stream.readline() == '1,Title 0," A ""quoted"", text\n'
    load("dbpedia14", str(tmp_path), Reading(Coding(max_length=7)))
    assert len(hub) == 2


def test_local_files_need_no_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    np.savez(tmp_path / "train.npz", x=np.zeros((3, 28, 28), np.uint8), y=[0, 1, 2], group=[5, 5, 6])
    assert load("femnist", str(tmp_path)).groups.tolist() == [5, 5, 6]


@pytest.mark.parametrize(("name", "file"), [("femnist", "train.npz"), ("dbpedia14", "train.csv")])
def test_without_the_package_it_is_said_what_to_install(tmp_path, monkeypatch, name, file):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it raises ImportError
    words = (
        rf"'{name}' is expected as {file} in .*pip install 'fedstrat\[hub\]'.*load\('{name}', '.'\).*set dataset.dir"
    )
    with pytest.raises(DataError, match=words):
        load(name, str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_a_hub_that_can_not_be_reached_leaves_no_half_set(tmp_path, hub, monkeypatch):
    def refuse(kind, split):
        if split == "test":
            return DBPEDIA["test"]
        raise ConnectionError("no network in tests")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", refuse)
    with pytest.raises(DataError, match=r"couldn't be fetched \(ConnectionError: no network in tests\); on a machine"):
        load("dbpedia14", str(tmp_path))
    assert not (tmp_path / "train.csv.gz").exists()
