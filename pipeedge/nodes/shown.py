"""The state of a cluster, and answers, for people."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeedge.base.console import Column, StandardOutput, print_table
from pipeedge.base.wording import figure
from pipeedge.nodes.messages import News

__all__ = ["answer_lines", "bar", "show_state", "state_page"]

_BAR = 24
_GIB = 1 << 30


def bar(progress: News) -> str:
    """Return one line with the progress of a node that fetches files."""
    part = min(1.0, progress.done / progress.total) if progress.total else 0.0
    full = round(part * _BAR)
    sizes = f"{progress.done / 1e6:.1f} of {progress.total / 1e6:.1f} MB"
    return f"{progress.node:>12} {'█' * full}{'░' * (_BAR - full)} {100 * part:3.0f} %  {sizes}"


def show_state(document: Mapping[str, Any], console: StandardOutput) -> None:
    """Print nodes, the run, its stages and its latest events."""
    print_table(console, _columns(_node_rows(document)))
    for name, model in document["runs"].items():
        console.print(f"{name} serves {model}", highlight=False, markup=False)
    run = document["run"]
    if run is None:
        return
    console.print(_headline(run), highlight=False, markup=False, soft_wrap=True)
    if stages := _stage_rows(run):
        print_table(console, _columns(stages))
    for name, why in run["refused"].items():
        console.print(f"left out: {name}: {why}", highlight=False, markup=False, soft_wrap=True)
    for event in run["events"][:5]:
        at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
        console.print(f"{at}  {event['line']}", highlight=False, markup=False, soft_wrap=True)


def _columns(rows: Sequence[Mapping[str, str]]) -> list[Column]:
    numbers = ("cores", "free", "rank", "busy", "stage")
    return [
        Column(title, [row[title] for row in rows], left=title not in numbers, names=title == "processor")
        for title in (rows[0] if rows else ())
    ]


def _node_rows(document: Mapping[str, Any]) -> list[dict[str, str]]:
    run = document["run"] or {"ranks": {}}
    ranks = {name: rank for rank, name in run["ranks"].items()}
    return [
        {
            "node": node["name"],
            "state": _node_state(node),
            "rank": ranks.get(node["name"], ""),
            "cores": str(node.get("cores", "")),
            "free": f"{node['memory'] / _GIB:.1f} GB" if "memory" in node else "",
            "processor": node.get("processor", ""),
            "address": node["address"] or "here",
        }
        for node in document["nodes"]
    ]


def _node_state(node: Mapping[str, Any]) -> str:
    if not node["here"]:
        return "not here"
    return f"works for {node['works_for']}" if node.get("works_for") else "waits"


def _headline(run: Mapping[str, Any]) -> str:
    where = f" at {run['url']}" if run["url"] else ""
    service = run["service"]
    figures = ""
    if service is not None:
        epoch = service["epoch"]
        state = "recovering" if epoch["recovering"] else f"epoch {epoch['number']}"
        unit = "tokens" if run["generates"] else "items"
        per_s = run[f"{unit}_per_s"]
        rate = "" if per_s is None else f", {figure(per_s, 3)} {unit}/s"
        figures = (
            f"{rate}, {state}, lost ranks {epoch['lost_ranks']}, waiting {service['queue'].get('waiting', 0)}"
        )
    return f"{run['model']}: {run['phase']}{where}{figures}"


def _stage_rows(run: Mapping[str, Any]) -> list[dict[str, str]]:
    service = run["service"]
    if service is None:
        return []
    return [
        {
            "stage": str(stage["stage"]),
            "node": run["ranks"].get(str(stage["rank"]), f"rank {stage['rank']}"),
            "layers": stage["layers"],
            "busy": f"{100 * stage['busy']:.0f} %",
        }
        for stage in service["stages"]
    ]


def state_page(document: Mapping[str, Any]) -> str:
    """Return the state as a page of HTML that needs nothing else."""
    parts = [_table("Nodes", _node_rows(document))]
    run = document["run"]
    if run is not None:
        parts.append(f"<p>{html.escape(_headline(run))}</p>")
        parts.append(_table("Stages", _stage_rows(run)))
        events = "".join(
            f"<li>{time.strftime('%H:%M:%S', time.localtime(event['at']))} {html.escape(event['line'])}</li>"
            for event in run["events"]
        )
        parts.append(f"<h2>Events</h2><ul>{events}</ul>")
    body = "".join(parts)
    return (
        '<!doctype html><meta charset="utf-8"><title>PipeEdge</title><style>body{font:15px sans-serif;'
        "margin:2rem;max-width:70rem}table{border-collapse:collapse}td,th{padding:.3rem .8rem;"
        f"text-align:left;border-bottom:1px solid #ccc}}</style><h1>{html.escape(document['asked'])}</h1>"
        f"{body}\n"
    )


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<h2>{title}</h2><table><tr>{head}</tr>{cells}</table>"


def answer_lines(reply: Any) -> Iterator[str]:
    """Yield the lines that say what a model has answered: classes with scores, or the reply itself."""
    classes = reply[0] if isinstance(reply, list) and reply and isinstance(reply[0], list) else reply
    if (
        isinstance(classes, list)
        and classes
        and all(isinstance(one, dict) and "label" in one for one in classes)
    ):
        width = max(len(str(one["label"])) for one in classes)
        for one in classes:
            yield f"{one['label']:{width}}  {one['score']:.4f}"
    else:
        yield json.dumps(reply)
