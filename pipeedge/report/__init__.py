"""The report of a run: its figures, its table, its page, and comparisons of two runs.

The page is one self-contained HTML file:

    JSON of a report ──read_run──> SavedRun ──┬── bottleneck   the part that limits the throughput, in words
    (old, partial, simulated)                 ├── gantt        a Timeline, drawn in the browser
                                              ├── charts       distributions and series, as SVG
                                              └── comparison   two of them side by side, as rows
                                                         └────── render ──> HTML

A missing part of the report leaves out its section of the page.
"""

from pipeedge.report.bottleneck import Part, find_bottleneck
from pipeedge.report.comparison import compare_lines, summary_lines
from pipeedge.report.render import render_comparison, render_run
from pipeedge.report.saved import SavedRun, read_run

__all__ = [
    "Part",
    "SavedRun",
    "compare_lines",
    "find_bottleneck",
    "read_run",
    "render_comparison",
    "render_run",
    "summary_lines",
]
