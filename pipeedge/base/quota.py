"""The limit on the processor time of this process, under which it runs and pauses in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeedge.base.machine import ControlGroups

__all__ = ["Quota"]


@dataclass(frozen=True)
class Quota:
    """Limit on the processor time of this process."""

    processors: float | None
    """Processor seconds per second if the limit makes this process pause, or None if it need not pause."""

    @classmethod
    def of_this_process(cls) -> Quota:
        """Return the limit of this process."""
        quota = ControlGroups().quota()
        return cls(quota if quota is not None and quota <= torch.get_num_threads() else None)

    @property
    def pauses(self) -> bool:
        """Whether this process runs and pauses in turn."""
        return self.processors is not None

    @property
    def stretch(self) -> float:
        """Elapsed seconds per second of processor time."""
        return 1.0 if self.processors is None else max(1.0, 1.0 / self.processors)
