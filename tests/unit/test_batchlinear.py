"""Linear layers whose gradients are computed at the end of a batch."""

from __future__ import annotations

import weakref

import torch
from tensors import assert_close

from pipeedge.train.batchlinear import BatchLinear


def test_a_deferred_gradient_holds_no_graph_and_is_added() -> None:
    layer, plain = BatchLinear(600, 500), torch.nn.Linear(600, 500)
    plain.load_state_dict(layer.state_dict())
    layer.expect(3)
    assert layer.waits(10)
    assert not layer.waits(12)  # 3 x 12 rows of 1100 values are more than an eighth of the weights
    for step in range(2):
        for part in range(3):
            values = torch.randn(2, 5, 600, generator=torch.Generator().manual_seed(part)).requires_grad_()
            factor = torch.full_like(values, 2.0, requires_grad=False)
            layer(values * factor).square().sum().backward(retain_graph=True)
            alive = weakref.ref(factor)
            del factor
            assert alive() is None
            given, values.grad = values.grad, None
            plain(values * 2).square().sum().backward()
            assert torch.allclose(given, values.grad, rtol=1e-5)
        assert layer.is_due
        assert (layer.weight.grad is None) == (step == 0)
        layer.finish()
        assert not layer.is_due
    assert_close({"weight": layer.weight.grad}, {"weight": plain.weight.grad})
    assert_close({"bias": layer.bias.grad}, {"bias": plain.bias.grad})
    with torch.no_grad():
        assert torch.equal(layer(values), plain(values))
