"""``pipeedge-simulate``: predict a run on a cluster that need not exist.

    YAML files ──┬── sched-pipeline ──> schedule ─┐
                 └── or a schedule file ──────────┤
                                                  ├── cluster ──> PipelineModel ──simulate──> report
    models, device types, devices, neighbours ────┘

options   the command line as a request
cluster   the cost of each stage and link according to the profiles (pure)
losses    a run that loses ranks: its epochs, and what each recovery costs
session   the steps of a simulation, and the report of the simulated run
main      the console script; ``python -m pipeedge.simulate`` is the same
"""
