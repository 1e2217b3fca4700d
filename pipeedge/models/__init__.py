"""Models as shards: ViT, DeiT and BERT, cut at four points of every block.

dtypes        number types of weights and computation
int8          linear layers with 8-bit weights
registry      names and directories -> Model
architecture  the numbers of a model; reading config.json
shard         shard arithmetic, once: which modules, which payload
vit deit bert what differs between the families
names         where each parameter lies in a file (tables)
weights       reading files piece by piece
fill          a file's tensors into a shard's parameters
download      fetching, checking and converting the known models' files
"""

from pipeedge.models.architecture import Architecture
from pipeedge.models.registry import DIGITS, MODEL_NAMES, Model, find_model
from pipeedge.models.shard import Shard

__all__ = ["DIGITS", "MODEL_NAMES", "Architecture", "Model", "Shard", "find_model"]
