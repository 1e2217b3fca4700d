"""Pipelined training: ``train.py``.

    command line ──> request ──one process──> workers, one for each core (or those of torchrun)
                                                  │
    network, partition, orders ──> engine (torch.distributed.pipelining over gloo) ──> losses, spans
    samples ───────────────────────┘      │
                              checkpoint ─┘                                 report, timeline

request     what is to be trained, how; validated
orders      the schedules as data: which worker does what, one after the other (pure)
networks    models as lists of layers, and the modules of some of them
dropout     masks that depend on the item alone
samples     batches of images and labels
costs       what one microbatch costs in each layer, measured
partition   which layers make which stage (pure; the native scheduler decides)
engine      the stages of one worker, a batch at a time
recording   what a worker was at (pure)
checkpoint  whole or not there
report      what came of it
session     one worker, from request to report
"""
