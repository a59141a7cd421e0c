"""Python values as plain JSON, and back equal in type and value, without ever running code.

`encode_value` and `decode_value` know by exact type what the standard library, numpy and torch have of
plain values; anything else is refused by name. A tensor is stored elsewhere and stands in the tree as a
`TensorRef`; a `PerRankRef` says that each rank has its own subtree. What belongs to a class that decoding
must not look up stands there as an `Instance`, until `resolve` makes an object of it.

The mapping that an object's `state_dict()` returns, and that of a whole state, are dicts whatever their
type; every other OrderedDict, Counter, defaultdict or dict is what it is. Mappings of other classes are
stored by their items: they are filled where the state has them, and dicts elsewhere.
"""

from ckpt.values.classes import instance_of, mapping_type, resolve
from ckpt.values.nodes import decode_value, encode_value
from ckpt.values.places import filled_in_place, given, put
from ckpt.values.records import MAPPINGS, MAX_DEPTH, Instance, PerRankRef, TensorRef
from ckpt.values.text import (
    PLAIN,
    SCALARS,
    NotPlainError,
    list_text,
    pairs_text,
)
from ckpt.values.trees import as_dict, common, iter_leaves, map_leaves, parts_of

__all__ = [
    "MAPPINGS",
    "MAX_DEPTH",
    "PLAIN",
    "SCALARS",
    "Instance",
    "NotPlainError",
    "PerRankRef",
    "TensorRef",
    "as_dict",
    "common",
    "decode_value",
    "encode_value",
    "filled_in_place",
    "given",
    "instance_of",
    "iter_leaves",
    "list_text",
    "map_leaves",
    "mapping_type",
    "pairs_text",
    "parts_of",
    "put",
    "resolve",
]
