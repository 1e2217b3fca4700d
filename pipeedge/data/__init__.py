"""Input: what to run, as microbatches of the tensors that the model takes.

model_inputs.py what a model says of its inputs (the wish: request.config.InputRequest)
source.py       Items -> InputSource -> Microbatch
reading.py      items read ahead, in threads of their own
images.py       pictures; text.py sentences; arrays.py ``.npz``
datasets        cola.py and imagenet.py
defaults.py     what is shipped, for runs that name no input
opening.py      InputRequest + model -> InputSource
"""

from pipeedge.data.model_inputs import ModelInputs
from pipeedge.data.opening import open_input, open_run_input
from pipeedge.data.reading import ReadAhead, read_threads
from pipeedge.data.source import Group, InputSource, Microbatch, Reading, SkippedItem
from pipeedge.request.config import DEFAULT_BATCH_SIZE, InputRequest

__all__ = [
    "DEFAULT_BATCH_SIZE",
    "InputRequest",
    "Group",
    "InputSource",
    "Microbatch",
    "ModelInputs",
    "ReadAhead",
    "Reading",
    "SkippedItem",
    "open_input",
    "open_run_input",
    "read_threads",
]
