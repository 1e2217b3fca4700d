"""``pipeedge-doctor``: check, with the arguments of a run and on each rank, whether the run would work.

    alone      name, interface, port; device, model, weights, input, output     ──> findings
       │ hello                                                                        │ facts
    together   rank 0: do all ranks agree, does the plan fit, do the files match? <──┘ ──> findings
       │ start
    links      each link of the plan, one after another, through the runtime's own transport
       │ done
    summary    bandwidth and latency of each, clocks                             ──> findings, a file

findings        one line each, and the exit status of all (pure)
notes           the findings of an examination, printed as they are made
network_checks  judge how a rank reaches rank 0: observations in, findings out (pure)
rank_checks     judge the ranks together (pure)
file_checks     judge the scheduler's files (pure)
link_checks     judge measured links (pure)
probe           questions to the machine itself, which tests replace
network_look    looks at name, interface and address
run_look        looks at device, model, weights, input, output and memory
links           measures a link
link_work       measures the links of a plan, one after another
review          rank 0's view of all ranks together
examine         the steps of an examination
main            the console script; ``python -m pipeedge.doctor`` is the same

Ranks meet through ``pipeedge.control`` with the messages of a run, so ranks that meet here also meet in a
run.
"""
