"""``pipeedge-simulate``: predict a run on a cluster that need not exist.

    YAML files ──┬── sched-pipeline ──> schedule ─┐
                 └── or a schedule file ──────────┴── sched-pipeline ──> costs
    costs ──cluster──> PipelineModel ──simulate──> report

simulation  a run that is computed instead of run, given what each stage and link costs (pure)
steps       steps of a decoder, made by the runtime's own scheduler of steps (pure)
options     the command line as a request
cluster     the hosts, and stages and links with what the scheduler says they cost (pure)
losses      a run that loses ranks: its epochs, and what each recovery costs
texts       a run of a decoder, and its report
session     the steps of a simulation, and the report of the simulated run
main        the console script; ``python -m pipeedge.simulate`` is the same
"""
