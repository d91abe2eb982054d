"""A client's examples: which ones, in which order, augmented how; and errors that name the node config."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstrat.data.clients import assign, describe, num_examples, shared, vocab_size
from fedstrat.data.loaders import Batches, CropAndFlip, client_data
from fedstrat.data.partition import partition
from fedstrat.data.sources import NAMED, load
from fedstrat.errors import ConfigError, DataError

RUN = {
    "num-clients": 50,
    "seed": 1,
    "dataset.name": "digits",
    "dataset.dir": "",
    "dataset.partition": "dirichlet",
    "dataset.alpha": 0.1,
    "dataset.classes-per-client": 2,
    "dataset.min-size": 5,
    "dataset.test-fraction": 0.2,
    "train.batch-size": 20,
}


def node(index, count=50):
    return {"partition-id": index, "num-partitions": count}


def numbered(count, batch_size, **settings):
    return Batches(torch.arange(count).float(), torch.arange(count), batch_size, **settings)


def order(batches):
    return [int(label) for _, y in batches for label in y]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_every_epoch_has_each_example_once_in_a_new_order():
    batches = numbered(10, 4, shuffle=True, generator=generator())
    first, second = order(batches), order(batches)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert [len(y) for _, y in batches] == [4, 4, 2]
    assert (len(batches), batches.num_examples) == (3, 10)
    assert all(torch.equal(x, y.float()) for x, y in batches)
    assert order(numbered(10, 4, shuffle=True, generator=generator())) == first


def test_order_ignores_the_global_generator():
    torch.manual_seed(1)
    first = order(numbered(50, 8, shuffle=True, generator=generator()))
    torch.manual_seed(2)
    assert order(numbered(50, 8, shuffle=True, generator=generator())) == first


def test_plain_keeps_the_order_and_the_inputs():
    batches = numbered(10, 4, shuffle=True, generator=generator(), augment=lambda x, g: x + 100)
    assert all((x >= 100).all() for x, _ in batches)
    plain = batches.plain(3)
    assert order(plain) == list(range(10))
    assert [len(y) for _, y in plain] == [3, 3, 3, 1]
    assert max(float(x.max()) for x, _ in plain) == 9
    assert batches.plain().batch_size == 4


def test_no_examples_no_batches():
    batches = numbered(0, 4, shuffle=True, generator=generator())
    assert (list(batches), len(batches), batches.num_examples) == ([], 0, 0)


def test_wrong_batches_are_refused():
    with pytest.raises(ConfigError, match=r"train\.batch-size.*got 0"):
        numbered(3, 0, shuffle=False)
    with pytest.raises(DataError, match="2 labels for 3 inputs"):
        Batches(torch.ones(3, 1), torch.ones(2), 1, shuffle=False)


def test_to_moves_the_examples_and_not_the_order():
    batches = numbered(10, 4, shuffle=True, generator=generator()).to("meta")
    assert {y.device.type for _, y in batches} == {"meta"}
    assert numbered(3, 1, shuffle=False).to(torch.device("cpu")).num_examples == 3


def test_crop_and_flip_takes_windows_of_the_padded_image():
    black = (-2.0, -3.0)
    x = torch.arange(1.0, 200 * 2 * 5 * 6 + 1).view(200, 2, 5, 6)
    out = CropAndFlip(black)(x, generator())
    assert out.shape == x.shape
    padded = np.pad(x.numpy(), [(0, 0), (0, 0), (4, 4), (4, 4)])
    padded[:, :, :, :] = np.where(padded == 0, np.array(black).reshape(1, 2, 1, 1), padded)
    seen = set()
    for i, image in enumerate(out.numpy()):
        windows = {
            (top, left, flip): padded[i, :, top : top + 5, left : left + 6][:, :, :: -1 if flip else 1]
            for top in range(9)
            for left in range(9)
            for flip in (False, True)
        }
        matches = [place for place, window in windows.items() if np.array_equal(window, image)]
        assert matches
        seen.add(matches[0])
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(9))
    assert {flip for _, _, flip in seen} == {False, True}
    torch.testing.assert_close(CropAndFlip(black)(x, generator()), out, rtol=0, atol=0)
    assert torch.equal(x.flatten(), torch.arange(1.0, x.numel() + 1))


def test_simulated_clients_share_the_data_out_without_overlap():
    seen, source = [], load("digits")
    parts = partition(source.y, 50, "dirichlet", alpha=0.1, min_size=5, seed=1)
    for index in range(50):
        own = assign(RUN, node(index))
        np.testing.assert_array_equal(np.sort(np.concatenate([own.train, own.test])), parts[index])
        assert len(own.train) == max(1, int(0.8 * len(parts[index])))
        assert num_examples(RUN, node(index)) == len(own.train)
        seen += [*own.train, *own.test]
    assert sorted(seen) == list(range(1797))
    assert [len(share.train) + len(share.test) for share in shared(RUN)[1]] == [len(part) for part in parts]


def test_each_client_has_a_split_of_its_own():
    run = RUN | {"dataset.partition": "iid", "num-clients": 3}
    places = []
    for index in (0, 1, 2):  # 599 samples each
        own = assign(run, node(index))
        places.append(np.isin(np.sort(np.concatenate([own.train, own.test])), own.test))
    assert not np.array_equal(places[0], places[1])
    assert not np.array_equal(places[1], places[2])


def test_changed_files_are_shared_out_anew(tmp_path):
    run = RUN | {"dataset.name": "npz", "dataset.dir": str(tmp_path), "dataset.partition": "iid"}
    for count in (500, 1000):
        np.savez(tmp_path / "train.npz", x=np.ones((count, 2)), y=np.zeros(count, int))
        assert sum(len(share.train) + len(share.test) for share in shared(run)[1]) == count


def test_client_data_holds_its_own_examples():
    own, source = assign(RUN, node(7)), load("digits")
    data = client_data(RUN, node(7), seed=3)
    np.testing.assert_array_equal(data.train.x.numpy(), source.x[own.train])
    np.testing.assert_array_equal(data.train.y.numpy(), source.y[own.train])
    np.testing.assert_array_equal(data.test.x.numpy(), source.x[own.test])
    np.testing.assert_array_equal(data.test.y.numpy(), source.y[own.test])
    assert (data.train.x.dtype, data.train.y.dtype) == (torch.float32, torch.int64)
    assert (data.train.batch_size, data.train.shuffle, data.test.shuffle) == (20, True, False)


def test_seed_of_the_call_decides_the_order_and_seed_of_the_run_the_part():
    big = max(range(50), key=lambda index: num_examples(RUN, node(index)))
    first, again, other = (client_data(RUN, node(big), seed=seed) for seed in (3, 3, 4))
    orders = [torch.cat([x for x, _ in data.train]) for data in (first, again, other)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert torch.equal(first.train.x, other.train.x)
    elsewhere = client_data(RUN | {"seed": 2}, node(big), seed=3)
    assert not torch.equal(first.test.x, elsewhere.test.x)


def test_clients_with_hardly_any_samples_survive(tmp_path):
    np.savez(tmp_path / "train.npz", x=np.ones((5, 2)), y=np.arange(5))
    run = RUN | {"dataset.name": "npz", "dataset.dir": str(tmp_path), "dataset.min-size": 0}
    for count, expected in ((5, (1, 0)), (2, (2, 1)), (9, (1, 0))):
        data = client_data(run | {"num-clients": count, "dataset.partition": "iid"}, node(0, count), seed=0)
        assert (data.train.num_examples, data.test.num_examples) == expected
    nothing = client_data(run | {"num-clients": 9, "dataset.partition": "iid"}, node(8, 9), seed=0)
    assert list(nothing.train) == list(nothing.test) == []
    assert nothing.train.x.shape == (0, 2)


def test_private_folder_with_both_files_is_used_as_it_is(tmp_path):
    np.savez(tmp_path / "train.npz", x=np.arange(6.0).reshape(3, 2), y=np.arange(3))
    np.savez(tmp_path / "test.npz", x=np.ones((2, 2)), y=np.zeros(2, int))
    config = {"dataset.dir": str(tmp_path)}
    data = client_data(RUN, config, seed=0)
    np.testing.assert_array_equal(data.train.x.numpy(), np.arange(6.0).reshape(3, 2))
    np.testing.assert_array_equal(data.test.x.numpy(), np.ones((2, 2)))
    assert num_examples(RUN, config) == 3
    # A node in a simulation of private folders has a partition-id, too: the folder is still its own.
    assert num_examples(RUN, config | node(49)) == 3


def test_private_folder_without_test_file_is_split(tmp_path):
    np.savez(tmp_path / "train.npz", x=np.arange(10.0).reshape(10, 1), y=np.arange(10))
    data = client_data(RUN, {"dataset.dir": str(tmp_path)}, seed=0)
    assert (data.train.num_examples, data.test.num_examples) == (8, 2)
    assert sorted([*data.train.y.tolist(), *data.test.y.tolist()]) == list(range(10))


def test_private_folder_of_a_named_set_is_normalised_and_augmented(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "train.npz", x=x, y=np.arange(4))
    named = client_data(RUN, {"dataset.dir": str(tmp_path), "dataset.name": "cifar10"}, seed=0)
    plain = client_data(RUN, {"dataset.dir": str(tmp_path)}, seed=0)
    assert isinstance(named.train.augment, CropAndFlip)
    expected = [-m / s for m, s in zip(NAMED["cifar10"].mean, NAMED["cifar10"].std, strict=True)]
    assert named.train.augment.black == pytest.approx(expected)
    assert named.test.augment is plain.train.augment is None
    assert named.train.x.min() < -1
    assert plain.train.x.min() >= 0


TEXT = {"dataset.vocabulary": "hashed", "dataset.vocab-size": 50, "dataset.max-length": 4}


def test_private_texts_have_the_same_ids_on_every_node(tmp_path):
    for name, rows in (("one", "0,red house\n0,a\n"), ("two", "1,house red\n1,b\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.csv").write_text(rows)
        (tmp_path / name / "test.csv").write_text("0,house\n")
    run = RUN | TEXT | {"dataset.name": "csv"}
    one, two = (client_data(run, {"dataset.dir": str(tmp_path / name)}, seed=0) for name in ("one", "two"))
    assert one.train.x.dtype == torch.int64
    assert one.train.x[0].tolist() == [*reversed(two.train.x[0, :2].tolist()), 0, 0]
    assert torch.equal(one.test.x, two.test.x)
    with pytest.raises(DataError, match=r"'frequent' counts .* this node's own.*'hashed', or to 'file'"):
        client_data(run | {"dataset.vocabulary": "frequent"}, {"dataset.dir": str(tmp_path / "one")}, seed=0)


def test_simulated_clients_share_the_frequent_words_of_all(tmp_path):
    (tmp_path / "train.csv").write_text("".join(f"{i % 2},word{i % 5} word0\n" for i in range(40)))
    run = RUN | TEXT | {"dataset.name": "csv", "dataset.dir": str(tmp_path), "dataset.vocabulary": "frequent"}
    run |= {"num-clients": 4, "dataset.partition": "iid"}
    data = [client_data(run, node(i, 4), seed=0) for i in range(4)]
    assert all((part.train.x[:, 1] == 2).all() for part in data)  # word0 is the most frequent
    assert torch.cat([part.train.x for part in data]).max() == 6
    with pytest.raises(ConfigError, match=r"expected 'dataset.max-length' of the run config"):
        client_data({k: v for k, v in run.items() if k != "dataset.max-length"}, node(0, 4), seed=0)


def test_clients_are_the_writers_that_the_files_tell(tmp_path):
    group = np.repeat([7, 3, 9], [10, 20, 30])
    np.savez(tmp_path / "train.npz", x=group[:, None] * 1.0, y=np.zeros(60, int), group=group)
    run = RUN | {"dataset.name": "npz", "dataset.dir": str(tmp_path), "dataset.partition": "craft", "num-clients": 3}
    data = [client_data(run, node(i, 3), seed=0) for i in range(3)]
    writers = [set(torch.cat([part.train.x, part.test.x]).flatten().tolist()) for part in data]
    assert sorted(map(sorted, writers)) == [[3.0], [7.0], [9.0]]
    assert sorted(part.train.num_examples for part in data) == [8, 16, 24]


def test_an_official_test_part_is_shared_out_by_fedvssam(tmp_path):
    np.savez(tmp_path / "train.npz", x=np.zeros((40, 1)), y=np.arange(40) % 4)
    np.savez(tmp_path / "test.npz", x=np.arange(1.0, 11.0)[:, None], y=np.arange(10) % 4)
    run = RUN | {"dataset.name": "npz", "dataset.dir": str(tmp_path), "num-clients": 5}
    run |= {"dataset.partition": "fedvssam-pathological", "dataset.classes-per-client": 3}
    data = [client_data(run, node(i, 5), seed=0) for i in range(5)]
    assert [part.train.num_examples for part in data] == [8] * 5
    assert sorted(torch.cat([part.test.x for part in data]).flatten().tolist()) == list(range(1, 11))


def test_no_number_of_clients_takes_the_nodes_word():
    assert len(assign(RUN | {"num-clients": 0}, node(0, 3)).train) == len(
        assign(RUN | {"num-clients": 3}, node(0, 99)).train
    )


@pytest.mark.parametrize(
    ("run", "config", "words"),
    [
        ({}, node(50), "'partition-id' 50 of the node config .* 50 clients .num-clients.* ids 0 to 49"),
        ({"num-clients": 0}, node(3, 3), "'partition-id' 3 of the node config .* 3 clients .num-partitions"),
        ({}, {}, "expected 'partition-id' in the node config.*--node-config"),
        ({}, {"partition-id": "3"}, "expected 'partition-id' in the node config, an integer"),
        ({}, {"partition-id": -1}, "expected 'partition-id' in the node config, an integer"),
        ({"num-clients": 0}, {"partition-id": 1}, "expected 'num-partitions' in the node config"),
        ({}, {"dataset.dir": 3}, "'dataset.dir' of the node config to be text"),
        ({}, {"dataset.dir": "/nowhere/at/all"}, "train.npz .* in /nowhere/at/all"),
        ({"dataset.name": "npz"}, node(0), "dataset.dir is empty"),
        ({"dataset.name": "digit"}, node(0), "did you mean 'digits'"),
        ({"num-clients": 1000}, node(0), "need 5000 samples, but the data set has 1797"),
        ({"dataset.test-fraction": 1.0}, node(0), "dataset.test-fraction"),
    ],
)
def test_wrong_node_or_request_is_a_data_error(run, config, words):
    with pytest.raises(DataError, match=re.compile(words, re.DOTALL)):
        client_data(RUN | run, config, seed=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("dataset.alpha", "much"), ("dataset.min-size", 2.5), ("num-clients", True), ("seed", None)],
)
def test_wrong_or_missing_run_config_key_is_named(key, value):
    with pytest.raises(ConfigError, match=f"expected '{key}' of the run config to be .* got {value!r}"):
        client_data(RUN | {key: value}, node(0), seed=0)
    run = {k: v for k, v in RUN.items() if k != key}
    with pytest.raises(ConfigError, match=f"expected '{key}' .* it isn't there"):
        client_data(run, node(0), seed=0)


def test_whole_numbers_serve_as_floats():
    assert len(assign(RUN | {"dataset.alpha": 1, "dataset.test-fraction": 0}, node(0)).test) == 0


@pytest.mark.parametrize("name", [*NAMED])
def test_describe_knows_the_named_sets_without_files(name):
    shape = NAMED[name].input_shape or (30,)
    run = RUN | {"dataset.name": name, "dataset.max-length": 30, "dataset.vocab-size": 77}
    assert describe(run) == (shape, NAMED[name].num_classes)
    assert vocab_size(run) == (77 if name == "dbpedia14" else 0)


def test_describe_reads_npz_from_the_node_else_the_run(tmp_path):
    np.savez(tmp_path / "train.npz", x=np.ones((2, 7)), y=[0, 2])
    run = RUN | {"dataset.name": "npz"}
    assert describe(run | {"dataset.dir": str(tmp_path)}) == ((7,), 3)
    assert describe(run, {"dataset.dir": str(tmp_path)}) == ((7,), 3)
    for directory, words in (("", "dataset.dir is empty"), (str(tmp_path / "no"), "dataset.dir is '.*no'")):
        with pytest.raises(DataError, match=rf"{words}.*set dataset.dir .* or model.name"):
            describe(run | {"dataset.dir": directory})


def test_describe_reads_texts_and_pictures_where_they_are(tmp_path):
    (tmp_path / "train.csv").write_text("0,a\n")
    (tmp_path / "classes.txt").write_text("x\ny\nz\n")
    run = RUN | TEXT | {"dataset.name": "csv"}
    assert describe(run | {"dataset.dir": str(tmp_path)}) == describe(run, {"dataset.dir": str(tmp_path)}) == ((4,), 3)
    for name, words in (("csv", "a train.csv like the clients'"), ("images", "sub-folders like the clients'")):
        with pytest.raises(DataError, match=f"data set '{name}'.*{words}.* or model.name"):
            describe(run | {"dataset.name": name, "dataset.image-size": 0})


def test_counting_examples_needs_no_torch():
    code = (
        "import sys; from fedstrat.data.clients import num_examples;"
        f" print(num_examples({RUN!r}, {node(7)!r}), 'torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(num_examples(RUN, node(7))), "False"]
