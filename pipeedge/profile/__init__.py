"""The profiler: measure the cost of each layer of a model on a kind of device, for the scheduler's files.

options    the command line                       -> a request
measuring  a shard, a payload                     -> seconds and bytes of each layer
handling   a payload                              -> seconds to receive and send it
machine    this machine                           -> its memory, its processors
network    this machine and another               -> the bandwidth between them
results    profiler_results.yml                  <-> ProfileResults
emitting   ProfileResults                         -> models.yml, device_types.yml
converting profiler_results.yml                   -> the same files, as separate programs
plotting   ProfileResults                         -> a picture
session    all of it, in order
main       the programs
"""
