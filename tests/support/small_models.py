"""Write small random models of each family to disk, with a vocabulary for the BERT."""

from __future__ import annotations

from pathlib import Path

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "slept", "all", "day")
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS)
_IMAGE = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 7,
}
_TEXT = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 24,
    "num_labels": 3,
}


def save_small_models(root: Path) -> dict[str, Path]:
    """Write the models below ``root``; return the Hugging Face directory of each family."""
    import transformers
    from models_oracle import save, scramble

    models = {
        "vit": transformers.ViTForImageClassification(transformers.ViTConfig(**_IMAGE)),
        "deit": transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**_IMAGE)),
        "bert": transformers.BertForSequenceClassification(transformers.BertConfig(**_TEXT)),
    }
    directories = {}
    for seed, (name, model) in enumerate(models.items()):
        scramble(model, seed)
        directories[name] = save(model, root / name)
    (directories["bert"] / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return directories
