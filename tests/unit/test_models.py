"""Test names, directories and dimensions of models, and messages for unusable ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.errors import InputError, ModelError, ScheduleError, WeightsError, one_line
from pipeedge.base.schedule import LayerRange
from pipeedge.models import DIGITS, MODEL_NAMES, find_model
from pipeedge.models.activations import ACTIVATIONS
from pipeedge.models.registry import SHIPPED

# name: layers, default file, and the reference that has as many weights
KNOWN: dict[str, tuple[int, str, type, dict[str, Any]]] = {
    "google/vit-base-patch16-224": (
        48,
        "ViT-B_16-224.npz",
        transformers.ViTForImageClassification,
        {"num_labels": 1000},
    ),
    "google/vit-large-patch16-224": (
        96,
        "ViT-L_16-224.npz",
        transformers.ViTForImageClassification,
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "num_labels": 1000,
        },
    ),
    "google/vit-huge-patch14-224-in21k": (
        128,
        "ViT-H_14.npz",
        transformers.ViTForImageClassification,
        {
            "hidden_size": 1280,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "intermediate_size": 5120,
            "patch_size": 14,
            "num_labels": 21843,
        },
    ),
    "facebook/deit-base-distilled-patch16-224": (
        48,
        "DeiT_B_distilled.npz",
        transformers.DeiTForImageClassificationWithTeacher,
        {"num_labels": 1000},
    ),
    "facebook/deit-small-distilled-patch16-224": (
        48,
        "DeiT_S_distilled.npz",
        transformers.DeiTForImageClassificationWithTeacher,
        {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "num_labels": 1000},
    ),
    "facebook/deit-tiny-distilled-patch16-224": (
        48,
        "DeiT_T_distilled.npz",
        transformers.DeiTForImageClassificationWithTeacher,
        {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "num_labels": 1000},
    ),
    "bert-base-uncased": (48, "BERT-B.npz", transformers.BertModel, {}),
    "bert-large-uncased": (
        96,
        "BERT-L.npz",
        transformers.BertModel,
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    ),
    "textattack/bert-base-uncased-CoLA": (
        48,
        "BERT-B-CoLA.npz",
        transformers.BertForSequenceClassification,
        {"num_labels": 2},
    ),
}


def test_all_model_names_are_known() -> None:
    assert set(MODEL_NAMES) == {*KNOWN, *SHIPPED}


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_match_the_hub(name: str) -> None:
    layers, file, cls, options = KNOWN[name]
    with torch.device("meta"):
        reference = cls(cls.config_class(**options))
    model = find_model(name)
    assert model.n_layers == layers
    assert model.weights_path() == Path(file)
    assert model.parameter_count() == sum(p.numel() for p in reference.parameters())
    assert model.weight_bytes() == 4 * model.parameter_count()
    assert model.config.eps == reference.config.layer_norm_eps
    assert model.config.activation == reference.config.hidden_act
    assert model.output_kind == ("logits" if options.get("num_labels") else "vector")
    (output,) = model.payload_specs(layers, items=3)
    assert output.shape == (3, options.get("num_labels", reference.config.hidden_size))


def test_parameters_of_parts_add_up() -> None:
    model = find_model("google/vit-base-patch16-224")
    parts = [model.parameter_count(LayerRange(layer, layer + 1)) for layer in range(model.n_layers)]
    assert sum(parts) == model.parameter_count()
    # A block of ViT-Base by its four layers: norms of 2 x 768, matrices with their biases.
    assert parts[4:8] == [
        2 * 768 + 3 * 768 * 769,
        768 * 769,
        2 * 768 + 3072 * 769,
        768 * 3073,
    ]


@pytest.mark.parametrize(
    ("name", "pixels", "block", "classes"),
    [
        # parameters_in and parameters_out of the scheduler's own models.yml
        ("google/vit-base-patch16-224", 150528, [302592, 151296, 756480, 151296], 1000),
        ("google/vit-large-patch16-224", 150528, [403456, 201728, 1008640, 201728], 1000),
    ],
)
def test_payload_elements_match_the_original_profiles(
    name: str, pixels: int, block: list[int], classes: int
) -> None:
    model = find_model(name)
    elements = [
        sum(spec.elements for spec in model.payload_specs(layer, items=1))
        for layer in range(model.n_layers + 1)
    ]
    assert elements == [pixels, *(block * (model.n_layers // 4))[:-1], classes]


def test_masks_travel_only_while_a_later_layer_attends() -> None:
    model = find_model("bert-base-uncased")
    for layer in range(1, model.n_layers):
        specs = model.payload_specs(layer, items=2, tokens=7)
        mask = [spec for spec in specs if spec.dtype == torch.bool]
        assert [spec.shape for spec in mask] == ([(2, 7)] if layer <= 44 else [])
        assert not mask or specs[-1] == mask[0]
    assert [spec.dtype for spec in model.payload_specs(0, items=2)] == [torch.int64] * 3
    assert model.payload_specs(0, items=2)[0].shape == (2, model.max_tokens)


def test_cuts_outside_the_model_are_refused() -> None:
    model = find_model("bert-base-uncased")
    for layer in (-1, 49):
        with pytest.raises(ScheduleError, match="1 to 48"):
            model.payload_specs(layer, items=1)
    for tokens in (0, 513):
        with pytest.raises(InputError, match="1 to 512"):
            model.payload_specs(1, items=1, tokens=tokens)
    with pytest.raises(ScheduleError, match="1 to 48"):
        model.build(LayerRange(40, 49))


# Names and directories ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("google/vit-base-patch16-244", "google/vit-base-patch16-224"),
        ("facebook/deit-tiny", "facebook/deit-tiny-distilled-patch16-224"),
        ("bert-base", "bert-base-uncased"),
        ("vit-digit", DIGITS),
        ("vit-base", "google/vit-base-patch16-224"),
        ("vit-large", "google/vit-large-patch16-224"),
        ("deit-tiny", "facebook/deit-tiny-distilled-patch16-224"),
        ("BERT-Large", "bert-large-uncased"),
    ],
)
def test_unknown_name_gets_nearest_suggestion(wrong: str, meant: str) -> None:
    with pytest.raises(ModelError) as caught:
        find_model(wrong)
    assert f"did you mean {meant}?" in str(caught.value)
    assert all(name in str(caught.value) for name in MODEL_NAMES)
    assert str(caught.value) == one_line(caught.value)


def test_dissimilar_name_gets_no_suggestion() -> None:
    with pytest.raises(ModelError) as caught:
        find_model("/nowhere/at/all")
    assert "did you mean" not in str(caught.value)


BASE = {
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
    "deit": {"model_type": "deit", "architectures": ["DeiTForImageClassificationWithTeacher"]},
    "bert": {"model_type": "bert", "architectures": ["BertModel"]},
    "roberta": {"model_type": "camembert", "architectures": ["CamembertModel"]},
    "mpnet": {"model_type": "mpnet", "architectures": ["MPNetModel"]},
    "electra": {"model_type": "electra", "architectures": ["ElectraModel"]},
    "albert": {"model_type": "albert", "architectures": ["AlbertModel"]},
    "dinov2": {"model_type": "dinov2", "architectures": ["Dinov2Model"]},
    "dinov3": {"model_type": "dinov3_vit", "architectures": ["DINOv3ViTModel"]},
    "clip": {"model_type": "clip", "architectures": ["CLIPModel"]},
    "siglip": {"model_type": "siglip_vision_model", "architectures": ["SiglipVisionModel"]},
    "modernbert": {"model_type": "modernbert", "architectures": ["ModernBertModel"]},
}


def write_config(directory: Path, family: str, **changes: object) -> Path:
    (directory / "config.json").write_text(json.dumps({**BASE[family], **changes}))
    return directory


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("vit", {"model_type": "swin"}, ["swin", "vit, deit, dinov2, "]),
        ("vit", {"model_type": None}, ["None", "vit, deit, dinov2, "]),
        ("vit", {"model_type": "distillbert"}, ["'distillbert'", "nearest supported one is 'distilbert'"]),
        ("vit", {"model_type": "xlm-roberta-xl"}, ["nearest supported one is 'xlm-roberta'"]),
        ("roberta", {"architectures": ["RobertaForCausalLM"]}, ["RobertaForCausalLM", "CamembertModel"]),
        ("roberta", {"is_decoder": True}, ["is_decoder", "encoders"]),
        ("roberta", {"max_position_embeddings": 2}, ["max_positions is 0"]),
        ("roberta", {"pad_token_id": -1}, ["pad_token_id is -1"]),
        ("roberta", {"type_vocab_size": 0}, ["type_vocab_size is 0"]),
        ("bert", {"type_vocab_size": 0}, ["type_vocab_size is 0"]),
        ("mpnet", {"relative_attention_num_buckets": 16}, ["relative_attention_num_buckets is 16", "32"]),
        ("electra", {"embedding_size": 0}, ["embedding_size is 0"]),
        ("electra", {"type_vocab_size": 0}, ["type_vocab_size is 0"]),
        ("albert", {"inner_group_num": 2}, ["inner_group_num is 2"]),
        ("albert", {"num_hidden_groups": 13}, ["num_hidden_groups is 13", "1 to 12"]),
        ("albert", {"embedding_size": 0}, ["embedding_size is 0"]),
        ("dinov2", {"image_size": [28, 42]}, ["image_size is [28, 42]", "squares"]),
        ("dinov2", {"patch_size": [14, 7]}, ["16 x 32 patches"]),
        ("dinov3", {"key_bias": True}, ["key_bias is true", "usual biases"]),
        ("dinov3", {"hidden_size": 36}, ["heads of 6 values", "a multiple of 4"]),
        ("dinov3", {"rope_theta": 0}, ["rope_theta 0", "at least 1"]),
        ("clip", {"vision_config": {"image_size": [32, 64]}}, ["image_size is [32, 64]", "squares"]),
        ("clip", {"vision_config": 7}, ["vision_config is 7", "an object is needed"]),
        ("siglip", {"vision_use_head": False}, ["vision_use_head is false"]),
        ("modernbert", {"classifier_pooling": "max"}, ["classifier_pooling 'max'", "cls and mean"]),
        ("modernbert", {"layer_types": ["full_attention"]}, ["layer_types", "each of 22 blocks"]),
        ("modernbert", {"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling is set"]),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, ["'yarn'", "default"]),
        ("modernbert", {"global_rope_theta": 0.5}, ["rope_theta 0.5", "at least 1"]),
        ("modernbert", {"num_attention_heads": 256}, ["heads of 3 values", "pairs"]),
        ("vit", {"architectures": ["ViTForMaskedImageModeling"]}, ["ViTForMaskedImage", "ViTModel"]),
        ("deit", {"architectures": ["DeiTForMaskedImageModeling"]}, ["DeiTForMaskedImage", "WithTeacher"]),
        ("bert", {"architectures": ["BertForMultipleChoice"]}, ["BertForMultiple", "BertForSequence"]),
        ("bert", {"architectures": ["ViTModel"]}, ["ViTModel", "bert"]),
        ("bert", {"architectures": "BertModel"}, ["architectures"]),
        ("bert", {"is_decoder": True}, ["is_decoder", "encoders"]),
        ("bert", {"add_cross_attention": True}, ["add_cross_attention"]),
        ("bert", {"position_embedding_type": "relative_key"}, ["relative_key", "absolute"]),
        ("bert", {"pruned_heads": {"0": [1]}}, ["pruned_heads"]),
        ("bert", {"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ("vit", {"hidden_act": "prelu"}, ["prelu", "gelu_new"]),
        ("vit", {"hidden_size": 100, "num_attention_heads": 12}, ["100", "12"]),
        ("vit", {"num_hidden_layers": 0}, ["blocks", "0", "1 to 1000"]),
        ("vit", {"hidden_size": "768"}, ["hidden_size", "'768'"]),
        ("vit", {"layer_norm_eps": "tiny"}, ["layer_norm_eps", "'tiny'"]),
        ("vit", {"layer_norm_eps": -1.0}, ["layer_norm_eps", "-1"]),
        ("vit", {"image_size": [224]}, ["image_size", "[224]", "[height, width]"]),
        ("vit", {"image_size": 8, "patch_size": 16}, ["image_size", "patch_size"]),
        ("vit", {"patch_size": 0}, ["patch_size", "0"]),
        ("deit", {"id2label": {}}, ["num_labels"]),
        ("vit", {"id2label": {"0": "a", "2": "b"}}, ["id2label", "gaps"]),
        ("vit", {"id2label": ["a"]}, ["id2label"]),
        ("vit", {"hidden_act": 3}, ["hidden_act", "3"]),
    ],
)
def test_unsupported_option_is_named(
    family: str, changes: dict[str, object], said: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        find_model(write_config(tmp_path, family, **changes))
    message = str(caught.value)
    assert str(tmp_path / "config.json") in message
    assert all(part in message for part in said), message
    assert message == one_line(caught.value)


def test_a_directory_needs_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        find_model(tmp_path)
    for content in ("{", "[]", "\x00"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=r"config\.json"):
            find_model(tmp_path)


def test_a_directory_without_weights_is_a_model_whose_weights_come_from_elsewhere(tmp_path: Path) -> None:
    model = find_model(write_config(tmp_path, "bert", num_hidden_layers=1))
    assert model.random().layers == LayerRange(0, 4)
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        model.load()


def test_only_meaningful_labels_are_kept(tmp_path: Path) -> None:
    named = find_model(write_config(tmp_path, "vit", id2label={"1": "dog", "0": "cat", "2": "cow"}))
    assert named.labels == ("cat", "dog", "cow")
    assert named.config.num_labels == 3
    unnamed = find_model(write_config(tmp_path, "vit", id2label={"0": "LABEL_0", "1": "LABEL_1"}))
    assert unnamed.labels is None
    assert unnamed.config.num_labels == 2
    # transformers does not write out the two classes that are its default.
    assert find_model(write_config(tmp_path, "vit")).config.num_labels == 2
    assert find_model("textattack/bert-base-uncased-CoLA").labels == ("unacceptable", "acceptable")
    headless = find_model(write_config(tmp_path, "vit", id2label={}))
    assert headless.output_kind == "vector"


@pytest.mark.parametrize(
    ("cls", "head"),
    [
        (transformers.DeiTForImageClassificationWithTeacher, "distilled"),
        (transformers.ViTForImageClassification, "classifier"),
        (transformers.BertForSequenceClassification, "classifier"),
        (transformers.BertModel, "vector"),
        (transformers.XLMRobertaForSequenceClassification, "classifier"),
        (transformers.RobertaForTokenClassification, "tokens"),
        (transformers.DistilBertForTokenClassification, "tokens"),
        (transformers.MPNetModel, "vector"),
        (transformers.AlbertForSequenceClassification, "classifier"),
    ],
)
def test_head_is_found_from_weights_without_architectures(cls: type, head: str, tmp_path: Path) -> None:
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    cls(cls.config_class(**size)).save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    del document["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(document))
    model = find_model(tmp_path)
    assert model.config.head == head
    model.load()


def test_sizes_by_which_ranks_and_stored_weights_are_compared_keep_their_form() -> None:
    """Converted weights carry a fingerprint that depends on this form."""
    assert find_model("bert-base-uncased").config.as_dict() == {
        "activation": "gelu",
        "blocks": 12,
        "channels": 0,
        "eps": 1e-12,
        "family": "bert",
        "head": "vector",
        "heads": 12,
        "hidden": 768,
        "image_size": (0, 0),
        "intermediate": 3072,
        "max_positions": 512,
        "num_labels": 0,
        "patch_size": (0, 0),
        "pooler": True,
        "pooler_activation": "tanh",
        "pooler_size": 768,
        "qkv_bias": True,
        "type_vocab": 2,
        "vocab": 30522,
    }


def test_own_options_of_a_family_take_part_in_comparisons(tmp_path: Path) -> None:
    prints = set()
    for padding in (0, 1):
        config = find_model(write_config(tmp_path, "roberta", pad_token_id=padding)).config
        prints.add(json.dumps(config.as_dict()))
        assert config.as_dict()["options"] == {"padding_id": padding}
        assert config.max_positions == 512 - padding - 1
    assert len(prints) == 2


def test_blocks_that_share_weights_are_held_once(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 6}
    model = find_model(write_config(tmp_path, "albert", num_hidden_groups=2, **sizes))
    one = model.parameter_count(LayerRange(4, 8))
    assert model.parameter_count(LayerRange(4, 12)) == one
    assert model.parameter_count(LayerRange(4, 16)) == 2 * one
    assert model.parameter_count(LayerRange(2, 10)) == one
    with torch.device("meta"):
        reference = transformers.AlbertModel(transformers.AlbertConfig(num_hidden_groups=2, **sizes))
    assert model.parameter_count() == sum(parameter.numel() for parameter in reference.parameters())


def test_models_compare_by_value(tmp_path: Path) -> None:
    write_config(tmp_path, "vit")
    assert find_model(tmp_path) == find_model(str(tmp_path))
    assert find_model(tmp_path).directory == tmp_path
    assert find_model("bert-base-uncased").directory is None


# Activations ----------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(name=st.sampled_from(sorted(ACTIVATIONS)), seed=st.integers(0, 99))
def test_activations_match_transformers(name: str, seed: int) -> None:
    x = 6 * torch.randn(64, generator=torch.Generator().manual_seed(seed))
    expected = transformers.activations.ACT2FN[name](x.clone())
    torch.testing.assert_close(ACTIVATIONS[name](x.clone()), expected, rtol=0, atol=2e-6)


# The process ----------------------------------------------------------------------------------------------


def test_no_shard_has_dropout_or_gradients() -> None:
    shard = find_model("bert-base-uncased").build()
    assert not [name for name, module in shard.named_modules() if isinstance(module, torch.nn.Dropout)]
    assert not any(parameter.requires_grad for parameter in shard.parameters())


def test_images_are_sent_as_bytes_unless_given_as_values() -> None:
    """Eight pictures for ViT-Base take 1.2 MB instead of 4.8 MB."""
    vit = find_model("google/vit-base-patch16-224")
    (pictures,) = vit.input_specs(8)
    assert (pictures.dtype, pictures.bytes) == (torch.uint8, 8 * 224 * 224 * 3)
    (values,) = vit.input_specs(8, eight_bit=False)
    assert (values.dtype, values.bytes) == (torch.float32, 4 * 8 * 224 * 224 * 3)
    assert 2 * vit.input_bytes(dtype="int8", eight_bit=False) == vit.input_bytes(eight_bit=False)
    assert vit.input_bytes(dtype="bfloat16") == vit.input_bytes()
    assert (8 * vit.input_bytes(), 8 * vit.input_bytes(eight_bit=False)) == (pictures.bytes, values.bytes)
    bert = find_model("bert-base-uncased")
    assert bert.input_specs(2, 7) == bert.payload_specs(0, 2, 7)
