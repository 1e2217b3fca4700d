"""The profiler: what a kind of device needs for each layer of a model, in the scheduler's files.

options    the command line                       -> a request
measuring  a shard, a payload                     -> seconds and bytes of each layer
handling   a payload                              -> what taking and passing it on costs
machine    this machine                           -> its memory, its processors
network    this machine and another               -> the bandwidth between them
results    profiler_results.yml                  <-> ProfileResults
emitting   ProfileResults                         -> models.yml, device_types.yml
converting profiler_results.yml                   -> the same, by itself
plotting   ProfileResults                         -> a picture
session    all of it, in order
main       the programs
"""
