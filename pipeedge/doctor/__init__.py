"""``pipeedge-doctor``: check, with the arguments of a run and on each rank, whether the run would work.

    alone      name, interface, port; device, model, weights, input, output     ──> findings
       │ hello                                                                        │ facts
    together   rank 0: do all ranks agree, does the plan fit, do the files match? <──┘ ──> findings
       │ start
    links      each link of the plan, one after another, through the runtime's own transport
       │ done
    summary    bandwidth and latency of each, clocks                             ──> findings, a file

findings  one line each, and the exit status of all (pure)
checks    judges observations: facts in, findings out (pure)
links     measuring a link
probe     questions to the machine itself, which tests replace
review    rank 0's view of all ranks together
examine   the steps of an examination
main      the console script; ``python -m pipeedge.doctor`` is the same

Ranks meet through ``pipeedge.control`` with the messages of a run, so ranks that meet here also meet in a
run.
"""
