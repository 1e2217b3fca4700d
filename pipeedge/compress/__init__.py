"""Compressed links: fewer bits for each value that crosses a cut.

    payload ──clamping──> levels ─┐
       └───────────────────────codec──> codes, ranges ──wire──> tensors of a frame

``codec`` turns one tensor into codes and back. ``clamping`` chooses the range of values that the codes cover.
``wire`` puts both into a self-describing payload of ordinary tensors. ``link`` provides the two ends that
stages call for each microbatch. ``policies`` and ``adaptation`` choose the bits while the pipeline runs.
"""

from pipeedge.compress.clamping import Levels, Sample, choose_levels
from pipeedge.compress.codec import (
    EncodedTensor,
    Granularity,
    NonFiniteError,
    decode_tensor,
    encode_tensor,
    error_bound,
    is_compressible,
)
from pipeedge.compress.link import LinkDecoder, LinkEncoder
from pipeedge.compress.wire import wire_specs

__all__ = [
    "EncodedTensor",
    "Granularity",
    "Levels",
    "LinkDecoder",
    "LinkEncoder",
    "NonFiniteError",
    "Sample",
    "choose_levels",
    "decode_tensor",
    "encode_tensor",
    "error_bound",
    "is_compressible",
    "wire_specs",
]
