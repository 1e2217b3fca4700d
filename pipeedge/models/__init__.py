"""Models as shards: encoders of images and text, cut at four points of every block.

dtypes        number types of weights and computation
int8          linear layers with 8-bit weights
activations   activation functions by name
architecture  dimensions of a model
hub_config    typed access to config.json
family        what a family of models consists of
families      the families, one module each, and their catalogue
attention     attention, masks and norms
shard         modules and payloads of a range of layers
model         a model's properties, payloads and shards
known         the models known by name
registry      names and directories -> Model
progress      progress bars in bytes
weights       reading, writing, naming and fetching weights files
"""

from pipeedge.models.architecture import Architecture
from pipeedge.models.model import Model
from pipeedge.models.registry import DIGITS, MODEL_NAMES, find_model
from pipeedge.models.shard import Shard

__all__ = ["DIGITS", "MODEL_NAMES", "Architecture", "Model", "Shard", "find_model"]
