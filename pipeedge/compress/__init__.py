"""Compressed links: fewer bits for each value that crosses a cut.

    payload ──clamping──> levels ─┐
       └──transform──> rows ──codec──> codes, ranges ──wire──> tensors of a frame

``sizes`` says how large the result is. ``codec`` turns one tensor into codes and back. ``transform`` spreads
the large values of its rows first, if that helps. ``clamping`` chooses the range that the codes cover.
``wire`` puts all this into a self-describing payload of ordinary tensors. ``link`` provides the two ends that
stages call for each microbatch. ``policies`` and ``adaptation`` choose the bits while the pipeline runs.
"""

from typing import TYPE_CHECKING

from pipeedge.base.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeedge.compress.clamping import Levels, Sample, choose_levels
    from pipeedge.compress.codec import (
        EncodedTensor,
        NonFiniteError,
        decode_tensor,
        encode_tensor,
        error_bound,
        is_compressible,
    )
    from pipeedge.compress.link import LinkDecoder, LinkEncoder
    from pipeedge.compress.sizes import Granularity
    from pipeedge.compress.transform import Transform, hadamard
    from pipeedge.compress.wire import wire_specs

__all__ = [
    "EncodedTensor",
    "Granularity",
    "Levels",
    "LinkDecoder",
    "LinkEncoder",
    "NonFiniteError",
    "Sample",
    "Transform",
    "choose_levels",
    "decode_tensor",
    "encode_tensor",
    "error_bound",
    "hadamard",
    "is_compressible",
    "wire_specs",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "EncodedTensor": "codec",
        "Granularity": "sizes",
        "Levels": "clamping",
        "LinkDecoder": "link",
        "LinkEncoder": "link",
        "NonFiniteError": "codec",
        "Sample": "clamping",
        "Transform": "transform",
        "choose_levels": "clamping",
        "decode_tensor": "codec",
        "encode_tensor": "codec",
        "error_bound": "codec",
        "hadamard": "transform",
        "is_compressible": "codec",
        "wire_specs": "wire",
    },
)
