"""Texts: words, the three vocabularies, csv files in their layouts, and an error for every damage."""

import gzip
import os
import re
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fedstrat.data.sources import Reading, load
from fedstrat.data.text import Coding, encode, frequent, hashed, words
from fedstrat.errors import DataError

REAL = Path(os.environ.get("FEDSTRAT_DATA") or Path(__file__).parents[3] / "shared" / "data")


def read(folder, vocabulary="hashed", vocab_size=1000, max_length=6, name="csv"):
    return load(name, str(folder), Reading(Coding(vocabulary, vocab_size, max_length)))


def write(folder, content, name="train.csv"):
    (folder / name).write_text(content, encoding="utf-8")
    return folder


def test_words_are_runs_of_letters_and_digits_in_lower_case():
    assert words("The Æther, built in 1999\tby O'Neill_2!") == [
        "the",
        "æther",
        "built",
        "in",
        "1999",
        "by",
        "o",
        "neill_2",
    ]
    assert words(" -- ") == []


def test_hashed_ids_leave_padding_and_unknown_alone_and_spread():
    many = [f"word{i}" for i in range(5000)]
    ids = [hashed(word, 102) for word in many]
    assert min(ids) == 2
    assert max(ids) == 101
    assert hashed("city", 102) == 2 + zlib.crc32(b"city") % 100 == hashed("city", 102)
    # 5000 words over 100 ids: 50 each, with a deviation of 7.
    assert max(Counter(ids).values()) < 50 + 5 * 7


def test_frequent_words_come_first_and_equals_by_the_alphabet():
    texts = ["b a", "A c", "c d", "c b d zeta"]
    # c 3, a 2, b 2, d 2, zeta 1
    assert frequent(texts, 6) == {"c": 2, "a": 3, "b": 4, "d": 5}
    assert frequent(texts, 100) == {"c": 2, "a": 3, "b": 4, "d": 5, "zeta": 6}
    assert frequent(list(reversed(texts)), 6) == frequent(texts, 6)


def test_texts_are_cut_and_padded_behind():
    ids = encode(["a b c d", "", "b"], {"a": 5, "b": 6, "c": 7, "d": 8}.get, 3)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 0], [6, 0, 0]]
    assert ids.dtype == np.int32


def test_two_columns_count_from_zero(tmp_path):
    write(tmp_path, '1,"A city, in France"\n0,plain words\n\n2,third\n')
    write(tmp_path, "0,a film\n", "test.csv")
    source = read(tmp_path)
    assert source.y.tolist() == [1, 0, 2, 0]
    assert (source.num_train, source.num_classes, source.vocab_size) == (3, 3, 1000)
    assert source.x[0].tolist() == [hashed(w, 1000) for w in ("a", "city", "in", "france")] + [0, 0]
    assert source.features(np.array([3, 1])).tolist() == source.x[[3, 1]].tolist()
    assert source.features(np.array([3])).dtype == np.int64


def test_three_columns_count_from_one_and_join_title_and_text(tmp_path):
    write(tmp_path, '3,"Title One"," The text."\n1,Two,more\n')
    source = read(tmp_path)
    assert (source.y.tolist(), source.num_classes) == ([2, 0], 3)
    assert source.x[0].tolist() == [hashed(w, 1000) for w in ("title", "one", "the", "text")] + [0, 0]


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        ("label,text\n1,x\n0,y\n", [1, 0]),
        ("Class,text\n1,x\n2,y\n", [0, 1]),
        ("label,title,text\n0,t,x\n1,t,y\n", [0, 1]),
        ("\ufefflabel,text\n1,x\n", [1]),
        ("label,text\nsport,x\narts,y\nsport,z\n", [1, 0, 1]),
        ("sport,x\narts,y\n", [1, 0]),
    ],
)
def test_headers_and_names(tmp_path, content, labels):
    assert read(write(tmp_path, content)).y.tolist() == labels


def test_classes_file_gives_the_same_index_to_a_node_that_lacks_a_class(tmp_path):
    write(tmp_path, "sport\narts\n\nscience\n", "classes.txt")
    source = read(write(tmp_path, "science,x\nsport,y\n"))
    assert (source.y.tolist(), source.num_classes) == ([2, 0], 3)
    source = read(write(tmp_path, "0,x\n1,yy\n"))
    assert (source.y.tolist(), source.num_classes) == ([0, 1], 3)


def test_vocabulary_comes_from_the_train_part_alone(tmp_path):
    write(tmp_path, "0,b b a\n")
    write(tmp_path, "0,a a a a c\n", "test.csv")
    assert read(tmp_path, "frequent").x[:, :5].tolist() == [[2, 2, 3, 0, 0], [3, 3, 3, 3, 1]]


def test_vocabulary_file_is_the_same_for_all_who_have_it(tmp_path):
    write(tmp_path, "Beta\nalpha\n", "vocabulary.txt")
    source = read(write(tmp_path, "0,alpha beta gamma\n"), "file", vocab_size=4)
    assert source.x[0].tolist() == [3, 2, 1, 0, 0, 0]
    with pytest.raises(DataError, match=r"holds 2 words, but dataset.vocab-size 3 has room for 1; raise it .* to 4"):
        read(tmp_path, "file", vocab_size=3)
    (tmp_path / "vocabulary.txt").unlink()
    with pytest.raises(DataError, match=r"vocabulary.txt, .* doesn't exist; put it there, or set .* 'hashed'"):
        read(tmp_path, "file")


def test_a_changed_file_or_coding_is_read_anew(tmp_path):
    write(tmp_path, "0,one\n")
    assert len(read(tmp_path).y) == 1
    write(tmp_path, "0,one\n1,two words\n")
    assert len(read(tmp_path).y) == 2
    assert read(tmp_path, max_length=3).x.shape == (2, 3)
    assert read(tmp_path) is read(tmp_path)


def test_gzipped_files_are_read(tmp_path):
    with gzip.open(tmp_path / "train.csv.gz", "wt", encoding="utf-8") as stream:
        stream.write("0,un été\n")
    assert read(tmp_path).x[0, 1] == hashed("été", 1000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0,a\n1\n", r"line 2: expected a label and a text, but got 1 field"),
        ("0,a\n-1,b\n", r"whole numbers or names, but got both, '0' and '-1'"),
        ("class,a\n0,b\n", r"expected classes from 1 up .* got 0"),
        ('0,a\n1,"b\n', r"can't be read as comma-separated UTF-8 text behind line 1"),
        (b"0,a\xff\n", r"can't be read as comma-separated UTF-8"),
    ],
)
def test_damaged_rows_are_named(tmp_path, content, message):
    (tmp_path / "train.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_torn_gzip_missing_file_and_strange_names(tmp_path):
    with pytest.raises(DataError, match=r"train.csv or train.csv.gz .* holds nothing"):
        read(tmp_path)
    whole = gzip.compress(b"0,a\n" * 2000)
    (tmp_path / "train.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="can't be read as comma-separated"):
        read(tmp_path)
    write(tmp_path, "b,x\n")
    write(tmp_path, "a\n", "classes.txt")
    with pytest.raises(DataError, match=r"lines of its classes.txt, but got 'b'"):
        read(tmp_path)
    write(tmp_path, "5,x\n")
    with pytest.raises(DataError, match=r"names 1 classes, but there is a label 5"):
        read(tmp_path)
    write(tmp_path, "a\na\n", "classes.txt")
    with pytest.raises(DataError, match="it has 'a' twice"):
        read(tmp_path)


def test_dbpedia14_has_fourteen_classes(tmp_path):
    write(tmp_path, "14,Title,text\n1,Title,text\n")
    source = read(tmp_path, name="dbpedia14")
    assert (source.y.tolist(), source.num_classes) == ([13, 0], 14)
    with pytest.raises(DataError, match=r"texts in 14 classes, but they hold 15; rows of two fields count .* from 0"):
        read(write(tmp_path, "14,text\n"), name="dbpedia14")


def test_real_dbpedia14_part():
    folder = REAL / "dbpedia14"
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}; set FEDSTRAT_DATA to a folder that holds dbpedia14/")
    source = read(folder, "frequent", vocab_size=5000, max_length=64, name="dbpedia14")
    assert np.bincount(source.y).tolist() == [1000] * 14
    known = (source.x > 1).sum() / (source.x > 0).sum()
    assert known > 0.8  # of the words, by the 4998 most frequent ones
    assert re.fullmatch("dbpedia14", source.name)
