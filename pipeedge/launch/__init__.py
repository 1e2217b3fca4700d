"""``pipeedge-launch``: start all ranks of a run with one command and stop them together.

    arguments ──> commands (pure) ──> [rank 0 .. n-1] ──> supervisor ──> one exit status
                                                           streams logs, stops all when one fails

commands    where each rank runs, and the command that starts it
supervisor  the processes: labels output by rank, stops all of them when one fails
main        the console script
"""
