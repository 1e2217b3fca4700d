"""Models as shards: encoders of images and text, and decoders, cut at four points of every block.

What a model is, without torch, so that planning need not import it:

architecture  dimensions of a model
hub_config    typed access to config.json
family        what a family of models consists of
families      the families, one module each, and their catalogue
cuts          payloads by shape
outline       a model's properties, sizes and files
known         the models known by name
registry      names and directories -> Outline

What computes it:

dtypes        number types of weights and computation
int8          linear layers with 8-bit weights
activations   activation functions by name
attention     attention, masks and norms
layers        the layers of the families, one module each, and their catalogue
shard         modules and payloads of a range of layers
model         an Outline with shards
decoder       an Outline with stages that remember, for models that generate text
decoder_ends  their embedding and scores
progress      progress bars in bytes
weights       reading, writing, naming and fetching weights files
"""

from typing import TYPE_CHECKING

from pipeedge.base.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeedge.models.architecture import Architecture
    from pipeedge.models.model import Model, find_model
    from pipeedge.models.outline import Outline
    from pipeedge.models.registry import DIGITS, MODEL_NAMES, find_outline
    from pipeedge.models.shard import Shard

__all__ = [
    "DIGITS",
    "MODEL_NAMES",
    "Architecture",
    "Model",
    "Outline",
    "Shard",
    "find_model",
    "find_outline",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "DIGITS": "registry",
        "MODEL_NAMES": "registry",
        "Architecture": "architecture",
        "Model": "model",
        "Outline": "outline",
        "Shard": "shard",
        "find_model": "model",
        "find_outline": "registry",
    },
)
