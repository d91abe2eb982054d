"""Bytes on the wire, counted on the records that really travel."""

from collections.abc import Mapping
from typing import Any, Protocol

_RAW = "fedstrat.raw"


class _Array(Protocol):
    stype: str
    data: bytes


def array_payload_bytes(array: _Array) -> int:
    """Bytes of an array's numbers, without the header of its serialisation."""
    if array.stype == _RAW or len(array.data) < 10:
        return len(array.data)
    # npy: magic (6), version (2), header length (2 or 4 bytes, little-endian), header
    wide = array.data[6] > 1
    start = 12 if wide else 10
    return max(0, len(array.data) - start - int.from_bytes(array.data[8:start], "little"))


def count(records: Mapping[str, Any]) -> tuple[int, int]:
    """Count one message: (payload bytes, wire bytes).

    Payload is array data alone, every array counted. Wire counts every record as Flower's ``count_bytes`` does
    (keys and headers included), with equal arrays once, since Flower sends equal objects of a message once.
    """
    payload = wire = 0
    seen: dict[int, list[bytes]] = {}  # by length, so that few are compared, and those mostly by their first bytes
    for record in records.values():
        for key, value in record.items():
            wire += len(key)
            if hasattr(value, "data") and hasattr(value, "stype"):
                payload += array_payload_bytes(value)
                alike = seen.setdefault(len(value.data), [])
                if value.data not in alike:
                    alike.append(value.data)
                    wire += len(value.data)
            else:
                wire += _value_bytes(value)
    return payload, wire


def _value_bytes(value: Any) -> int:
    if isinstance(value, bool):
        return 1
    if isinstance(value, int | float):
        return 8
    if isinstance(value, str | bytes):
        return len(value)
    return sum(_value_bytes(item) for item in value)
