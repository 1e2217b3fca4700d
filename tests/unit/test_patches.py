"""Test the embeddings of patches against a convolution in twice the precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.models.architecture import ImageInput
from pipeedge.models.layers.patches import PatchEmbedding


@st.composite
def images(draw: st.DrawFn) -> ImageInput:
    """Return sizes of images that patches need not fill."""
    patch = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    size = tuple(side * draw(st.integers(1, 4)) + draw(st.integers(0, side - 1)) for side in patch)
    return ImageInput((size[0], size[1]), patch, draw(st.integers(1, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=cases(15))
@given(
    image=images(),
    hidden=st.integers(1, 40),
    items=st.integers(1, 3),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_patches_equal_a_convolution(
    dtype: torch.dtype, image: ImageInput, hidden: int, items: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = PatchEmbedding(image, hidden, bias=bias).to_empty(device="cpu").to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    pixels = torch.randn(items, image.channels, *image.image_size)
    found = layer(pixels)
    weight = layer.weight.double()
    given_bias = None if layer.bias is None else layer.bias.double()
    exact = F.conv2d(pixels.to(dtype).double(), weight, given_bias, stride=image.patch_size)
    expected = exact.flatten(2).transpose(1, 2)
    assert found.dtype is dtype
    # The result is rounded once; sums are of up to 324 products of the size of 1.
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=2e-4)
