"""Compressed links: fewer bits for each value that crosses a cut.

    payload ──clamping──> levels ─┐
       └───────────────────────codec──> codes, ranges ──wire──> tensors of a frame

``sizes`` says how large the result is. ``codec`` turns one tensor into codes and back. ``clamping`` chooses
the range of values that the codes cover. ``wire`` puts both into a self-describing payload of ordinary
tensors. ``link`` provides the two ends that stages call for each microbatch. ``policies`` and ``adaptation``
choose the bits while the pipeline runs.
"""

from typing import TYPE_CHECKING

from pipeedge.base.lazily import lazy_exports

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
        "choose_levels": "clamping",
        "decode_tensor": "codec",
        "encode_tensor": "codec",
        "error_bound": "codec",
        "is_compressible": "codec",
        "wire_specs": "wire",
    },
)
