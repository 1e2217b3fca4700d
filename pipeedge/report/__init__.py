"""The report of a run: its figures, its table, its page, comparisons of two.

The page is one HTML file that needs nothing else:

    JSON of a report ──read_run──> SavedRun ──┬── bottleneck   who holds the others back, in words
    (old, partial, simulated)                 ├── gantt        a Timeline, drawn in the browser
                                              ├── charts       distributions and series, as SVG
                                              └── comparison   two of them side by side, as rows
                                                         └────── render ──> HTML

A part of the report that is not there leaves its section out.
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
