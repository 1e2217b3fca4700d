"""``pipeedge-launch``: the ranks of a run, started by one command and ended together.

    arguments ──> commands (pure) ──> [rank 0 .. n-1] ──> supervisor ──> one exit status
                                                           streams logs, ends all when one fails

commands    where each rank runs, and the command that starts it
supervisor  the processes: output by rank, the end of one is the end of all
main        the console script
"""
