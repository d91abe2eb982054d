"""Folders of pictures: the same class index everywhere, and an error for every damage."""

import numpy as np
import pytest
from PIL import Image

from fedstrat.data.sources import Reading, load
from fedstrat.errors import DataError


def paint(path, value, size=(4, 3), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def read(folder, size=0):
    return load("images", str(folder), Reading(image_size=size))


def test_classes_are_the_sorted_sub_folders_and_train_comes_first(tmp_path):
    paint(tmp_path / "train" / "dog" / "a.png", (10, 20, 30))
    paint(tmp_path / "train" / "cat" / "b.png", (40, 50, 60))
    paint(tmp_path / "test" / "emu" / "c.png", (70, 80, 90))
    (tmp_path / "train" / "dog" / "notes.txt").write_text("no picture")
    source = read(tmp_path)
    assert (source.y.tolist(), source.num_train, source.num_classes) == ([0, 1, 2], 2, 3)
    assert (source.x.shape, source.x.dtype) == ((3, 3, 3, 4), np.uint8)
    assert source.x[:, :, 0, 0].tolist() == [[40, 50, 60], [10, 20, 30], [70, 80, 90]]
    assert source.features(np.array([1]))[0, 0, 0, 0] == pytest.approx(10 / 255)


def test_a_folder_without_train_is_all_train(tmp_path):
    paint(tmp_path / "b" / "1.png", 1, mode="L")
    paint(tmp_path / "a" / "1.PNG", 2, mode="L")
    source = read(tmp_path)
    assert (source.y.tolist(), source.num_train, source.x.shape) == ([0, 1], 2, (2, 1, 3, 4))
    assert source.x[:, 0, 0, 0].tolist() == [2, 1]


def test_a_node_without_a_class_keeps_the_index_by_an_empty_folder_or_classes_txt(tmp_path):
    paint(tmp_path / "one" / "c" / "1.png", 1, mode="L")
    (tmp_path / "one" / "a").mkdir()
    assert (read(tmp_path / "one").y.tolist(), read(tmp_path / "one").num_classes) == ([1], 2)
    paint(tmp_path / "two" / "c" / "1.png", 1, mode="L")
    (tmp_path / "two" / "classes.txt").write_text("c\na\nb\n")
    assert (read(tmp_path / "two").y.tolist(), read(tmp_path / "two").num_classes) == ([0], 3)
    paint(tmp_path / "two" / "d" / "1.png", 1, mode="L")
    with pytest.raises(DataError, match=r"lines of its classes.txt, but got 'd'"):
        read(tmp_path / "two")


def test_grey_among_colour_has_three_equal_channels(tmp_path):
    paint(tmp_path / "a" / "1.png", 7, mode="L")
    paint(tmp_path / "a" / "2.png", (1, 2, 3, 255), mode="RGBA")
    assert read(tmp_path).x[:, :, 0, 0].tolist() == [[7, 7, 7], [1, 2, 3]]


def test_sizes_must_agree_or_are_brought_to_one(tmp_path):
    paint(tmp_path / "a" / "1.png", 7, mode="L")
    paint(tmp_path / "a" / "2.png", 9, size=(8, 8), mode="L")
    with pytest.raises(DataError, match=r"one size, 4 x 3 as .*1.png, but .*2.png has 8 x 8; set dataset.image-size"):
        read(tmp_path)
    source = read(tmp_path, size=5)
    assert source.x.shape == (2, 1, 5, 5)
    assert source.x[1].min() == source.x[1].max() == 9


def test_no_pictures_no_folder_and_damaged_pictures(tmp_path):
    with pytest.raises(DataError, match=r"expected pictures .* there are none"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"expected pictures .* there are none"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"'images' reads a sub-folder of pictures per class .* dataset.dir is empty"):
        read("")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"1.png can't be read as a picture"):
        read(tmp_path)


def test_new_pictures_are_noticed(tmp_path):
    paint(tmp_path / "a" / "1.png", 7, mode="L")
    assert len(read(tmp_path).y) == 1
    paint(tmp_path / "a" / "2.png", 7, mode="L")
    assert len(read(tmp_path).y) == 2
