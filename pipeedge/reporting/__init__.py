"""``pipeedge-report``: pages from reports that were saved as JSON, and two of them side by side.

main   the console script; ``python -m pipeedge.reporting`` is the same
"""
