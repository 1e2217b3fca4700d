"""Input: the items to run, as microbatches of tensors that the model takes; and the results.

items            items that are decoded on request
source           Items -> InputSource -> Microbatch, read ahead in separate threads
images           images -> pixel_values; pictures and png decode image files
text             sentences -> token ids, by sentence_rules and tokenizer_files of the model;
                 text_files, tables and labels read files; beginnings cuts long texts
arrays           .npz files
cola, imagenet   data sets; selection chooses their items
defaults         input that ships with the package, for runs that name none
companions       tokenizers and image processors next to a model
opening          InputRequest + model -> InputSource
ends             where microbatches come from and results go: a file, or requests and answers
results          result files and accuracy; row_formats, row_documents and parquet make the rows
output_rows      the file of rows, from its unfinished output
prompts, answers prompts of decoders, from files, and their answers as .jsonl
step_queue       prompts that wait for their tokens: source and sink of a decoder
protected_files  inputs that no output may replace
fingerprint      whether a later run has the same input
agreement        outputs compared with those in float32
"""

from pipeedge.data.ends import DataEnds, ItemSource, ItemStream, ResultSink
from pipeedge.data.items import Reading
from pipeedge.data.opening import open_input, open_run_input
from pipeedge.data.source import Group, InputSource, InputStream, Microbatch, SkippedItem, read_threads
from pipeedge.request.files import DEFAULT_ITEMS, InputRequest

__all__ = [
    "DEFAULT_ITEMS",
    "DataEnds",
    "InputRequest",
    "Group",
    "InputSource",
    "InputStream",
    "ItemSource",
    "ItemStream",
    "Microbatch",
    "Reading",
    "ResultSink",
    "SkippedItem",
    "open_input",
    "open_run_input",
    "read_threads",
]
