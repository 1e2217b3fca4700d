"""Write small random models of each family to disk, with a vocabulary for text."""

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
_SENTENCES = {"vocab_size": len(VOCABULARY), "max_position_embeddings": 24, "num_labels": 3}
_TEXT = {
    **_SENTENCES,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
}


def save_small_models(root: Path) -> dict[str, Path]:
    """Write the models below ``root``; return the Hugging Face directory of each family."""
    import transformers
    from models_oracle import save, scramble

    # RoBERTa and MPNet have rows in the position table that no position uses.
    longer = {"max_position_embeddings": 26}
    narrow = {"dim": 24, "n_layers": 3, "n_heads": 3, "hidden_dim": 40}
    models = {
        "vit": transformers.ViTForImageClassification(transformers.ViTConfig(**_IMAGE)),
        "deit": transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**_IMAGE)),
        "bert": transformers.BertForSequenceClassification(transformers.BertConfig(**_TEXT)),
        "roberta": transformers.RobertaForSequenceClassification(
            transformers.RobertaConfig(**_TEXT | longer | {"type_vocab_size": 1})
        ),
        "distilbert": transformers.DistilBertForSequenceClassification(
            transformers.DistilBertConfig(**_SENTENCES | narrow)
        ),
        "mpnet": transformers.MPNetForSequenceClassification(transformers.MPNetConfig(**_TEXT | longer)),
        "electra": transformers.ElectraForSequenceClassification(
            transformers.ElectraConfig(**_TEXT, embedding_size=12)
        ),
        "albert": transformers.AlbertForSequenceClassification(
            transformers.AlbertConfig(**_TEXT, embedding_size=12)
        ),
    }
    image = {key: value for key, value in _IMAGE.items() if key not in ("intermediate_size", "num_labels")}
    pads = {f"{name}_token_id": 0 for name in ("pad", "eos", "bos", "cls", "sep")}
    models |= {
        "dinov2": transformers.Dinov2WithRegistersForImageClassification(
            transformers.Dinov2WithRegistersConfig(**image, num_labels=7, use_swiglu_ffn=True)
        ),
        "clip": transformers.CLIPModel(
            transformers.CLIPConfig(vision_config=_IMAGE, text_config=_TEXT | pads, projection_dim=10)
        ),
        "siglip": transformers.SiglipForImageClassification(
            transformers.SiglipConfig(vision_config=_IMAGE, text_config=_TEXT | pads, num_labels=7)
        ),
        "modernbert": transformers.ModernBertForSequenceClassification(
            transformers.ModernBertConfig(**_TEXT | pads, local_attention=6)
        ),
        "dinov3": transformers.DINOv3ViTModel(
            transformers.DINOv3ViTConfig(**_IMAGE, num_register_tokens=2, use_gated_mlp=True)
        ),
    }
    directories = {}
    for seed, (name, model) in enumerate(models.items()):
        scramble(model, seed)
        directories[name] = save(model, root / name)
    for name in ("bert", "roberta", "distilbert", "mpnet", "electra", "albert", "modernbert"):
        (directories[name] / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return directories
