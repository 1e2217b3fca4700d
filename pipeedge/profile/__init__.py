"""The profiler: measure the cost of each layer of a model on a kind of device, for the scheduler's files.

options          the command line               -> a request
results          the measurements of all layers as data
result_files     profiler_results.yml          <-> results
measuring        a shard, a payload             -> seconds and bytes of each layer
handling         a payload                      -> seconds to receive and send it
data_work        a data rank                    -> seconds to feed and collect a microbatch
rehearsal        a stage at work                 -> what it costs besides its parts
forecast         a pass of a model            -> how long measuring will take
network          this machine and another       -> the bandwidth between them
job              a request                      -> the profiles to measure, and the form of their results
layer_work       a job                          -> the measurements of its layers
dtype_agreement  a job                          -> how often its number type agrees with float32
sensitivity      a model                      -> what fewer bits at each cut change in its answers
emitting         results                        -> models.yml, device_types.yml
plotting         results                        -> a picture
products         results                        -> all files that were asked for
synthetic        a device type                  -> one whose times are a multiple of its own
converting       profiler_results.yml           -> the scheduler's files, as separate programs
display          the progress bar and the summary
session          all of it, in order
main             the programs
"""
