"""Learnt positions of patches, interpolated if images are of another size than those of the training."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pipeedge.models.architecture import ImageInput

__all__ = ["placed"]


def placed(table: torch.Tensor, image: ImageInput, *, antialias: bool = False) -> torch.Tensor:
    """Return the positions of the prefix tokens and patches of an image, [..., T, D].

    Args:
        table: Positions of the prefix tokens and of the patches that the model was trained with, in rows.
        image: Sizes of the images.
        antialias: Whether positions are smoothed before they are interpolated to fewer.
    """
    if image.grid == image.trained_grid:
        return table
    rows, columns = image.trained_grid
    prefix = table.shape[-2] - rows * columns
    first, patches = table[..., :prefix, :], table[..., prefix:, :]
    as_image = patches.float().reshape(1, rows, columns, -1).permute(0, 3, 1, 2)
    resized = F.interpolate(
        as_image, size=image.grid, mode="bicubic", align_corners=False, antialias=antialias
    )
    in_rows = resized.permute(0, 2, 3, 1).reshape(*table.shape[:-2], -1, table.shape[-1])
    return torch.cat([first, in_rows.to(table.dtype)], dim=-2)
