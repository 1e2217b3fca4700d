"""Classes that come with a request, for a model of natural language inference. Pure.

text, "This example is {}." and a class ──> does the text entail the sentence? ──> score of the class

https://arxiv.org/abs/1909.00161 introduced it; scores are those of transformers' zero-shot pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeedge.base.errors import InputError
from pipeedge.base.wording import excerpt
from pipeedge.serve.bodies import PredictBody

__all__ = ["Hypotheses", "hypotheses"]

_TEMPLATE = "This example is {}."
_PLACE = "{}"
_ENTAILS, _CONTRADICTS = "entail", "contradict"


@dataclass(frozen=True)
class Hypotheses:
    """Sentences that a text entails or not, one for each class."""

    labels: tuple[str, ...]
    sentences: tuple[str, ...]
    entailment: int
    """Output of the model that says that the text entails the sentence."""
    contradiction: int
    """Output of the model that says that the text contradicts it."""
    alone: bool
    """Whether each class is scored by itself, rather than all against each other."""

    def ranked(self, logits: np.ndarray) -> list[tuple[str, float]]:
        """Return the classes with their scores, best first.

        Args:
            logits: Outputs of the model for each sentence [classes, outputs].
        """
        entails = logits[:, self.entailment].astype(np.float64)
        if self.alone:
            scores = 1 / (1 + np.exp(logits[:, self.contradiction].astype(np.float64) - entails))
        else:
            powers = np.exp(entails - entails.max())
            scores = powers / powers.sum()
        order = np.argsort(-scores, kind="stable").tolist()
        return [(self.labels[number], float(scores[number])) for number in order]


def hypotheses(body: PredictBody, outputs: Sequence[str] | None, model: str) -> Hypotheses:
    """Return the sentences that a request with ``candidate_labels`` asks about.

    Args:
        body: The request.
        outputs: Names of the model's own classes, or None if it has none.
        model: Name of the model.

    Raises:
        InputError: The model is not made for this, or the request contradicts itself.
    """
    parameters = body.parameters
    names = [name.lower() for name in outputs or ()]
    found = [number for number, name in enumerate(names) if name.startswith(_ENTAILS)]
    if not found or len(names) == 1:
        raise InputError(
            f"candidate_labels: {model} knows its own classes only; others need a model of natural language "
            "inference, which has a class entailment"
        )
    if body.raw_scores or parameters.function_to_apply is not None:
        name = "raw_scores" if body.raw_scores else "function_to_apply"
        raise InputError(f"{name} and candidate_labels do not go together: leave out one of them")
    labels = tuple(label.strip() for label in parameters.candidate_labels or ())
    if not all(labels):
        raise InputError("candidate_labels: one of them is empty")
    template = _TEMPLATE if parameters.hypothesis_template is None else parameters.hypothesis_template
    if _PLACE not in template:
        raise InputError(f"hypothesis_template {excerpt(template)}: has no {{}} in place of the class")
    entailment = found[0]
    others = [number for number, name in enumerate(names) if name.startswith(_CONTRADICTS)]
    return Hypotheses(
        labels=labels,
        sentences=tuple(template.replace(_PLACE, label) for label in labels),
        entailment=entailment,
        contradiction=others[0] if others else (len(names) - 1 if entailment == 0 else 0),
        alone=bool(parameters.multi_label) or len(labels) == 1,
    )
