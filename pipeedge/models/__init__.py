"""Models as shards: ViT, DeiT and BERT, cut at four points of every block.

dtypes        number types of weights and computation
int8          linear layers with 8-bit weights
activations   activation functions by name
registry      names and directories -> Model
architecture  dimensions of a model; reading config.json
shard         modules and payloads of a range of layers
families      differences between ViT, DeiT and BERT
progress      progress bars in bytes
weights       reading, writing, naming and fetching weights files
"""

from pipeedge.models.architecture import Architecture
from pipeedge.models.registry import DIGITS, MODEL_NAMES, Model, find_model
from pipeedge.models.shard import Shard

__all__ = ["DIGITS", "MODEL_NAMES", "Architecture", "Model", "Shard", "find_model"]
