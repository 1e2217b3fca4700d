"""``pipeedge-doctor``: would this run work? Asked before it, with its own arguments, on each rank.

    alone      name, interface, port; device, model, weights, input, output     ──> findings
       │ hello                                                                        │ facts
    together   rank 0: do all agree, does the plan fit, do the files fit each other? <┘ ──> findings
       │ start
    links      each link of the plan, one after another, through the runtime's own transport
       │ done
    summary    bandwidth and latency of each, clocks                             ──> findings, a file

findings  one line each, and the exit status of all (pure)
checks    what was seen in, findings out (pure)
estimate  what a link carries, by repeated measurements, and whether they agree (pure)
links     measuring a link
probe     what is asked of the machine itself, which tests replace
examine   the order of all that
main      the console script; ``python -m pipeedge.doctor`` is the same

Ranks meet through ``pipeedge.control`` by the messages of a run, so what meets here meets there too.
"""
