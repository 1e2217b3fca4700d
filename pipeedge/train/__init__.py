"""Pipelined training: ``train.py``.

    command line ──> request ──one process──> workers, one for each core (or those of torchrun)
                                                  │
    network, partition, orders ──> engine (torch.distributed.pipelining over gloo) ──> losses, spans
    samples ───────────────────────┘      │
                              checkpoint ─┘                                 report, timeline

request     what to train and how, validated
orders      the schedules as data: the actions of each worker, in order (pure)
networks    models as lists of layers, and the modules of some of them
dropout     masks that depend only on the item
samples     batches of images and labels
costs       the measured cost of one microbatch in each layer
partition   the layers of each stage (pure; the native scheduler decides)
engine      the stages of one worker, a batch at a time
recording   the activities of a worker (pure)
checkpoint  weights and optimizer state on disk, complete or absent
report      the results of a training
session     one worker, from request to report
"""
