"""Test the structure of the package from its source: imports, and which modules have side effects."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from places import ROOT

PACKAGE = ROOT / "pipeedge"

ROOMS = (
    *("base", "request", "models", "decoding", "compress", "transport", "observe", "control", "plan", "data"),
    *("report", "serve", "run"),
    *("profile", "launch", "api", "train", "doctor", "auction", "testbed", "simulate", "nodes", "cli"),
)
"""Packages. One imports only earlier ones, and the module of ``python -m pipeedge`` all of them."""

PURE = (
    "doctor.file_checks",
    "doctor.findings",
    "doctor.link_checks",
    "doctor.network_checks",
    "doctor.rank_checks",
    "auction.market",
    "auction.ordered",
    "auction.sale",
    "testbed.cluster",
    "control.announcement",
    "control.attempts",
    "control.admission",
    "control.changing",
    "control.clocks",
    "control.epoch_member",
    "control.epochs",
    "control.losses",
    "control.plans",
    "control.rank_messages",
    "control.supervision",
    "control.failures",
    "control.roster",
    "control.rules",
    "control.telemetry",
    "control.rank_watch",
    "control.liveness",
    "control.load_deadline",
    "control.messages",
    "base.backpressure",
    "base.wording",
    "base.text_lengths",
    "base.errors",
    "base.fields",
    "launch.commands",
    "observe.metrics",
    "decoding.speculation",
    "simulate.steps",
    "plan.after_loss",
    "plan.cache_owners",
    "profile.step_fit",
    "plan.costs",
    "plan.conditions",
    "plan.change_detection",
    "plan.facts",
    "plan.live_choice",
    "plan.placing",
    "plan.problem",
    "plan.prediction",
    "plan.specs",
    "base.json_types",
    "base.lazy_exports",
    "base.shapes",
    "data.beginnings",
    "decoding.pages",
    "decoding.steps",
    "decoding.sampler",
    "decoding.sampling",
    "decoding.structure",
    "decoding.text_stream",
    "decoding.tools",
    "models.activations",
    "models.architecture",
    "models.cuts",
    "models.family",
    "models.families.catalogue",
    "models.hub_config",
    "models.shapes",
    "models.weights.names",
    "serve.batching",
    "serve.bodies",
    "serve.description",
    "serve.reference",
    "serve.tensors",
    "serve.text_bodies",
    "serve.zero_shot",
    "report.bottleneck",
    "report.charts",
    "report.comparison",
    "report.document",
    "report.gantt",
    "report.saved",
    "base.payload",
    "plan.link_speed",
    "plan.listed_model",
    "profile.likeness",
    "profile.results",
    "observe.assembly",
    "observe.lanes",
    "observe.records",
    "compress.clamping",
    "compress.codec",
    "compress.link",
    "compress.policies",
    "compress.sizes",
    "compress.transform",
    "compress.wire",
    "base.schedule",
    "simulate.cluster",
    "simulate.simulation",
    "transport.frame",
    "transport.place",
    "transport.tcp_hello",
    "observe.timeline",
    "observe.trace",
)
"""Modules of pure functions over plain data."""

EFFECTS = {
    "asyncio",
    "io",
    "multiprocessing",
    "os",
    "psutil",
    "queue",
    "random",
    "select",
    "selectors",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
}

READS_ENVIRONMENT = {"request.environment"}
WRITES_ENVIRONMENT = {
    "doctor.run_look",
    "profile.main",
    "run.main",
    "train.main",
    "transport.interfaces",
}
"""Modules that set the interface of gloo and TensorPipe or torch's log level, which has no other way."""

UNPICKLES = {"models.weights.pickled"}
"""Modules that unpickle: only downloads from a hub, only into tensors, and only to convert them."""

MODULE_STATE = {"transport.rpc._serving"}
"""A remote call names a function, which has no other way to the transport of its process. torch keeps its RPC
agent in a module too, so there is one of each in a process."""

CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"}
CHANGES |= {"setdefault", "update", "appendleft", "popleft"}
"""Methods that modify a container in place."""

SLEEPS = {
    "base.interrupt",
    "control.hub_address",
    "control.uplink",
    "profile.power",
    "profile.rehearsal",
    "testbed.network",
}
"""Modules that sleep: no event tells that imports end, a remote port opens, or a cable carries; an idle
machine is watched for a while; and a rehearsed stage waits for stages that are not there."""


def module_name(path: Path) -> str:
    """Return ``run.stage`` for ``pipeedge/run/stage.py``; a package has its own name, and the root is ''."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Modules(Mapping[str, ast.Module]):
    """Modules of the package by name, each parsed when it is asked for: every worker collects these tests."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._trees: dict[str, ast.Module] = {}

    def __getitem__(self, name: str) -> ast.Module:
        if name not in self._trees:
            self._trees[name] = ast.parse(self._paths[name].read_text("utf-8"))
        return self._trees[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


MODULES = Modules({module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))})


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a module."""
    return tuple(ast.walk(tree))


def imported(node: ast.AST) -> list[str]:
    """Yield the absolute names that an import statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"a relative import in line {node.lineno}"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def own(name: str) -> str | None:
    """Return the module of this package that an absolute name is or lies in, or None."""
    if name != "pipeedge" and not name.startswith("pipeedge."):
        return None
    short = name.removeprefix("pipeedge").removeprefix(".")
    while short not in MODULES:
        short = short.rpartition(".")[0]
    return short


def imported_modules(module: str, tree: ast.Module) -> set[str]:
    """Return the modules of this package that a module imports anywhere, for type checkers too."""
    targets = {target for node in nodes(tree) for name in imported(node) if (target := own(name))}
    return {target for target in targets if target != module and not module.startswith(f"{target}.")}


def test_every_package_has_a_place_in_the_order() -> None:
    found = {module.split(".")[0] for module in MODULES} - {"", "__main__"}
    assert found == set(ROOMS), f"{found ^ set(ROOMS)}: give it a place in ROOMS"


@pytest.mark.parametrize("module", [module for module in MODULES if module not in {"", "__main__"}])
def test_a_package_imports_only_what_stands_above_it(module: str) -> None:
    room = ROOMS.index(module.split(".")[0])
    targets = imported_modules(module, MODULES[module])
    below = sorted(target for target in targets if ROOMS.index(target.split(".")[0]) > room)
    assert not below, f"pipeedge.{module} imports {below}, which stand below it"


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module: imported_modules(module, tree) for module, tree in MODULES.items()}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, with the cycle


@cache
def imports(tree: ast.AST) -> set[str]:
    """Top-level names that a module imports anywhere, for type checkers alone apart."""
    typed = [node for node in nodes(tree) if isinstance(node, ast.If)]
    typed = [node for node in typed if ast.unparse(node.test) == "TYPE_CHECKING"]
    unread = {inner for node in typed for inner in ast.walk(node)}
    return {name for node in nodes(tree) if node not in unread for name in imported(node)}


@cache
def effects(tree: ast.AST) -> set[str]:
    """Modules and calls by which a module touches the world."""
    modules = {name.split(".")[0] for name in imports(tree)} & EFFECTS
    calls = {ast.unparse(node.func) for node in nodes(tree) if isinstance(node, ast.Call)}
    files = {call for call in calls if re.search(r"\.(read|write)_(text|bytes)$|\.open$", call)}
    return modules | calls & {"open", "print", "input"} | files


def ways(module: str, trees: Mapping[str, ast.AST]) -> dict[str, str]:
    """Every module that an import of ``module`` runs, with the way that leads there."""
    found, waiting = {}, [(module, module)]
    while waiting:
        name, way = waiting.pop()
        if name in found:
            continue
        found[name] = way
        targets = {target for target in map(own, imports(trees[name])) if target is not None}
        waiting += [(target, f"{way} -> {target}") for target in sorted(targets)]
    return found


@pytest.mark.parametrize("module", PURE)
def test_decisions_are_pure(module: str) -> None:
    """Neither the module nor one that it imports, however indirectly, touches the world."""
    reached = ways(module, MODULES)
    impure = {way: sorted(found) for name, way in reached.items() if (found := effects(MODULES[name]))}
    assert not impure


def test_an_effect_behind_an_import_is_found() -> None:
    trees = {name: ast.parse("") for name in MODULES}
    trees["observe.lanes"] = ast.parse("from pipeedge.observe import records")
    trees["observe.records"] = ast.parse("def f():\n    from pipeedge.base import crew")
    trees["base.crew"] = ast.parse("import threading")
    reached = ways("observe.lanes", trees)
    assert reached["base.crew"] == "observe.lanes -> observe.records -> base.crew"
    assert effects(trees["base.crew"]) == {"threading"}


def attributes(tree: ast.AST, name: str) -> list[ast.Attribute]:
    """Return the places where a module uses ``module.attribute``."""
    base, _, attribute = name.partition(".")
    found = (node for node in nodes(tree) if isinstance(node, ast.Attribute) and node.attr == attribute)
    return [node for node in found if isinstance(node.value, ast.Name) and node.value.id == base]


def test_the_environment_is_read_in_one_place() -> None:
    readers, writers = set(), set()
    for module, tree in MODULES.items():
        written = [
            node.value
            for node in nodes(tree)
            if (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))
            or (isinstance(node, ast.Attribute) and node.attr == "setdefault")
        ]
        for use in attributes(tree, "os.environ") + attributes(tree, "os.environb"):
            (writers if use in written else readers).add(module)
        if attributes(tree, "os.getenv"):
            readers.add(module)
        from_os = [name for node in nodes(tree) for name in imported(node) if name.startswith("os.")]
        assert not {"os.environ", "os.environb", "os.getenv"} & set(from_os), module
    assert readers <= READS_ENVIRONMENT
    assert writers <= WRITES_ENVIRONMENT


def test_nothing_checks_input_by_assert() -> None:
    """``python -O`` removes assertions."""
    found = [
        f"{module}:{node.lineno}"
        for module, tree in MODULES.items()
        for node in nodes(tree)
        if isinstance(node, ast.Assert)
    ]
    assert not found


def test_nothing_is_unpickled() -> None:
    for module, tree in MODULES.items():
        names = {name.split(".")[0] for node in nodes(tree) for name in imported(node)}
        unpickles = bool(names & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"})
        for call in (node for node in nodes(tree) if isinstance(node, ast.Call)):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert keywords.get("allow_pickle", "False") == "False", f"{module}:{call.lineno}"
            if ast.unparse(call.func) == "torch.load":
                unpickles = True
                assert keywords.get("weights_only") == "True", f"{module}:{call.lineno}"
        assert not unpickles or module in UNPICKLES, module


def test_nothing_polls() -> None:
    sleepers = {module for module, tree in MODULES.items() if attributes(tree, "time.sleep")}
    assert sleepers <= SLEEPS


def module_names(tree: ast.Module) -> set[str]:
    """Return the names that a module binds at its top level, without imports."""
    targets: list[ast.expr] = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return {target.id for target in targets if isinstance(target, ast.Name)}


def mutations(tree: ast.Module) -> set[str]:
    """Yield module-level names that functions of a module rebind or modify in place."""
    names, changed = module_names(tree), set()
    functions = (node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.Lambda))
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Global):
            changed |= set(node.names)
        base: ast.AST | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            base = node.func.value
        elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            base = node.value
        if isinstance(base, ast.Name) and base.id in names:
            changed.add(base.id)
    return changed


def test_no_function_changes_module_state() -> None:
    changed = {f"{module}.{name}" for module, tree in MODULES.items() for name in mutations(tree)}
    assert changed == MODULE_STATE


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = []\ndef f():\n    x.append(1)", {"x"}),
        ("x = {}\ndef f():\n    x['a'] = 1", {"x"}),
        ("x: int = 0\ndef f():\n    global x\n    x = 1", {"x"}),
        ("x = []\ndef f(x):\n    return x[0]", set()),
    ],
)
def test_changes_of_module_state_are_seen(source: str, found: set[str]) -> None:
    assert mutations(ast.parse(source)) == found


def test_no_two_modules_have_a_class_of_one_name() -> None:
    homes: dict[str, set[str]] = {}
    for module, tree in MODULES.items():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(module)
    shared = {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}
    assert not shared, f"give each a name of its own: {shared}"


def test_every_module_has_a_docstring() -> None:
    silent = [module for module, tree in MODULES.items() if not ast.get_docstring(tree)]
    assert not silent


def test_the_picture_of_the_layout_is_true() -> None:
    """All names in the layout of docs/development.md exist, and every package is in it."""
    page = (ROOT / "docs" / "development.md").read_text("utf-8")
    (picture,) = re.findall(r"^## Layout\n.*?```text\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    named, folder = set(), ROOT
    for line in picture.splitlines():
        names = re.split(r"  +", line.strip())[0].split()  # two blanks: here the explanation begins
        if not line.startswith(" "):
            folder = ROOT
        for name in names:
            assert (folder / name).exists(), f"{name} in the layout does not exist"
            named.add(folder / name)
        if not line.startswith(" "):
            folder = ROOT / names[-1]
    missing = sorted(room for room in ROOMS if PACKAGE / room not in named)
    assert not missing, f"not in the layout of docs/development.md: {missing}"
