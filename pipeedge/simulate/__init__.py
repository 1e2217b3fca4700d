"""``pipeedge-simulate``: a run on a cluster that need not be there.

    YAML files ──┬── sched-pipeline ──> schedule ─┐
                 └── or a schedule file ──────────┤
                                                  ├── cluster ──> PipelineModel ──simulate──> report
    models, device types, devices, neighbours ────┘

options   the command line as a request
cluster   what each stage and link costs, by the profiles (pure)
session   the order of all that, and the report of the run that did not take place
main      the console script; ``python -m pipeedge.simulate`` is the same
"""
