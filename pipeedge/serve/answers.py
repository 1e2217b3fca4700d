"""The outputs of one item, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from pipeedge.base.errors import RequestError
from pipeedge.data.row_documents import class_name

__all__ = ["ModelAnswer", "ScoredClass", "check_kind"]

_GIVES = MappingProxyType(
    {
        "logits": "classifies an item as a whole: use top() or best",
        "tokens": "classifies every token: use tokens",
        "vector": "gives a vector, and no classes: use outputs",
    }
)
"""What to use of the answers of a model, by its kind of outputs."""


def check_kind(kind: str, wanted: str) -> None:
    """Refuse to read outputs as something that they are not.

    Raises:
        RequestError: ``kind`` is not ``wanted``.
    """
    if kind != wanted:
        raise RequestError(f"the model {_GIVES[kind]}")


@dataclass(frozen=True)
class ScoredClass:
    """A class, and how sure the model is of it."""

    number: int
    name: str | None
    """Name of the class, or None if the model does not define one."""
    score: float
    """Softmax score over all classes; the output itself if it is the only one."""

    @property
    def label(self) -> str:
        """Name of the class, or its number as ``LABEL_3`` if it has none."""
        return f"LABEL_{self.number}" if self.name is None else self.name


@dataclass(frozen=True, eq=False)
class ModelAnswer:
    """Outputs of the model for one item.

    >>> answer = ModelAnswer(np.float32([0.0, 2.0]), ("cat", "dog"))
    >>> answer.best.label, round(answer.best.score, 3)
    ('dog', 0.881)
    """

    outputs: npt.NDArray[np.float32]
    """Logits [classes]; those of each token [tokens, classes]; a vector, for a model without a classifier."""
    class_names: Sequence[str] | None = field(default=None, repr=False)
    """Names of the classes, or None if the model does not define them."""
    kind: str = "logits"
    """What the outputs are, as a model's ``output_kind``: ``logits``, ``tokens`` or ``vector``."""

    def top(self, count: int | None = None) -> list[ScoredClass]:
        """Return the best ``count`` classes, best first; all without a count.

        Raises:
            RequestError: The outputs are not logits.
        """
        self._check("logits")
        scores = self._scores()
        best = np.argsort(-scores, kind="stable")[:count]
        pairs = zip(best.tolist(), scores[best].tolist(), strict=True)
        return [ScoredClass(number, class_name(self.class_names, number), score) for number, score in pairs]

    def _scores(self) -> npt.NDArray[np.float64]:
        """Return what ``row_documents.class_scores`` does, by NumPy, which is faster for one item."""
        logits = self.outputs.astype(np.float64)
        if len(logits) == 1:
            return logits
        powers: npt.NDArray[np.float64] = np.exp(logits - logits.max())
        scores: npt.NDArray[np.float64] = powers / powers.sum()
        return scores

    def _check(self, wanted: str) -> None:
        """Raise an error if the outputs are not of the kind that is wanted."""
        check_kind(self.kind, wanted)

    @property
    def best(self) -> ScoredClass:
        """Best class.

        Raises:
            RequestError: The outputs are not logits.
        """
        return self.top(1)[0]

    @property
    def tokens(self) -> list[ScoredClass]:
        """Best class of each token, in order.

        Raises:
            RequestError: The outputs are not logits of each token.
        """
        self._check("tokens")
        return [ModelAnswer(row, self.class_names).best for row in self.outputs]
