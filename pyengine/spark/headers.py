"""The column `headers`: a message's properties as Spark's Kafka source gives a record's headers."""

from __future__ import annotations

import numpy
import pyarrow as pa
from pyarrow import compute

from pyengine.formats.constants import NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR


def header_column(properties: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Name and value of each property in the text's order, doubles too; null for a message without any.

    `properties`: the texts as stored. As RocketMQ reads them: a piece without a separator, name or value is none.
    """
    pieces = compute.split_pattern(properties, PROPERTY_SEPARATOR)
    flat = pieces.flatten()
    separator_at = compute.find_substring(flat, NAME_VALUE_SEPARATOR).to_numpy(zero_copy_only=False)
    lengths = compute.binary_length(flat).to_numpy(zero_copy_only=False)
    is_property = (separator_at > 0) & (separator_at + 1 < lengths)
    pairs = compute.split_pattern(flat.filter(pa.array(is_property)), NAME_VALUE_SEPARATOR, max_splits=1).flatten()
    places = numpy.arange(0, len(pairs), 2)
    names, values = pairs.take(pa.array(places)), pairs.take(pa.array(places + 1)).cast(pa.binary())
    offsets = numpy.concatenate(([0], numpy.cumsum(is_property)))[pieces.offsets.to_numpy()].astype(numpy.int32)
    has_none = offsets[1:] == offsets[:-1]
    structs = pa.StructArray.from_arrays([names, values], fields=list(wanted.value_type))
    return pa.ListArray.from_arrays(pa.array(offsets), structs, type=wanted, mask=pa.array(has_none))
