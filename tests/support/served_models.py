"""Small random models that answer requests, beside those that transformers computes for comparison."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from models_oracle import save, scramble
from small_models import VOCABULARY

CLASSES = ("bad", "fair", "good")
MOST_TOKENS = 16


def save_bert(
    directory: Path, *, classes: int = len(CLASSES), head: bool = True
) -> transformers.PreTrainedModel:
    """Write a small BERT with its vocabulary, and return it."""
    names = dict(enumerate(CLASSES[:classes]))
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        max_position_embeddings=MOST_TOKENS,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        id2label=names,
        label2id={name: number for number, name in names.items()},
    )
    kind = transformers.BertForSequenceClassification if head else transformers.BertModel
    reference = kind(config).eval()
    scramble(reference, 7)
    save(reference, directory)
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return reference


def token_ids(*texts: str) -> torch.Tensor:
    """Return the ids [1, tokens] of a sentence, or of a pair of them."""
    words = ["[CLS]", *(word for text in texts for word in (*text.split(), "[SEP]"))]
    return torch.tensor([[VOCABULARY.index(word) for word in words]])


def token_types(*texts: str) -> torch.Tensor:
    """Return the token types [1, tokens] of a sentence, or of a pair of them."""
    lengths = [len(text.split()) + 1 for text in texts]
    lengths[0] += 1
    return torch.tensor([[place for place, length in enumerate(lengths) for _ in range(length)]])
