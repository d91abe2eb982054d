"""Bytes of a message: array data alone for tables, and all that Flower counts for operators."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

import fedstrat
from fedstrat.metrics.traffic import array_payload_bytes, count
from fedstrat.payloads import numpy_array, raw_array
from tests.strategies.small import TRAINED, everything
from tests.unit.asked import Asked


def flower_counts(content: RecordDict) -> int:
    return sum(record.count_bytes() for record in content.values())


def test_hand_made_records():
    numbers = torch.arange(6.0).reshape(2, 3)
    content = RecordDict(
        {
            "arrays": ArrayRecord({"w": numpy_array(numbers), "bb": raw_array(numbers[0])}),
            "config": ConfigRecord(
                {"i": 1, "f": 0.5, "b": True, "s": "four", "bs": b"123", "l": [1, 2], "ls": ["a", "bc"]}
            ),
            "metrics": MetricRecord({"n": 3, "each": [1.0, 2.0, 3.0]}),
        }
    )
    # 6 and 3 floats. On the wire also: a header of 128 bytes and the keys w, bb; 8 + 8 + 1 + 4 + 3 + 16 + 3 and
    # 9 letters of keys; 8 + 24 and 5 letters.
    assert count(content) == (24 + 12, (128 + 24 + 1) + (12 + 2) + (43 + 9) + (32 + 5))
    assert count(content)[1] == flower_counts(content)


def test_equal_arrays_count_once_on_the_wire_and_each_in_the_payload():
    once, other = numpy_array(torch.randn(100)), numpy_array(torch.randn(100))
    again = Array(once.dtype, once.shape, once.stype, bytes(once.data))
    content = {"a": ArrayRecord({"x": once, "y": again}), "b": ArrayRecord({"x": once, "y": other})}
    payload, wire = count(content)
    assert payload == 4 * 400
    assert wire == 2 * (128 + 400) + 4
    assert count({"a": content["a"]}) == (800, 128 + 400 + 2)


def test_a_message_of_nothing():
    assert count(RecordDict()) == (0, 0)
    assert count({"a": ArrayRecord(), "m": MetricRecord()}) == (0, 0)


@pytest.mark.parametrize(
    "value", [np.zeros((0, 3)), np.array(1.5, np.float32), np.zeros((2, 3), order="F"), np.zeros(5, dtype=">i2")]
)
def test_the_header_of_npy_is_no_payload(value: np.ndarray):
    assert array_payload_bytes(Array(value)) == value.nbytes


def test_a_header_of_version_2_and_broken_bytes():
    def of(data: bytes, stype: str = "numpy.ndarray") -> Any:
        return SimpleNamespace(stype=stype, data=data)

    assert array_payload_bytes(of(b"\x93NUMPY\x02\x00" + (300).to_bytes(4, "little") + bytes(300 + 64))) == 64
    assert array_payload_bytes(of(b"\x93NUM")) == 4
    assert array_payload_bytes(of(b"\x93NUMPY\x01\x00\xff\xff" + bytes(8))) == 0
    assert array_payload_bytes(of(bytes(7), "fedstrat.raw")) == 7


def test_messages_of_a_round():
    # SCAFFOLD sends the whole state_dict (the tied weight under both names) and one control per trained parameter.
    model = everything()
    message = Asked(fedstrat.SCAFFOLD(trainable=TRAINED), model).message()
    whole = sum(t.nbytes for t in model.state_dict().values())
    trained = sum(p.nbytes for n, p in model.named_parameters() if n in TRAINED)
    payload, wire = count(message.content)
    assert payload == whole + trained
    # Equal objects travel once: the tied weight, and zeros of one shape.
    assert whole < wire < flower_counts(message.content)
