"""Import what forked programs need, in the server that forks them: ``processes.fork_server``.

The collector of cycles stays away from all that is imported here. It would look through it for nothing, and a
page of memory that it touches in a forked program has to be copied.
"""

from __future__ import annotations

import gc
import importlib

MODULES = (
    *("pipeedge.auction.main", "pipeedge.doctor.examine", "pipeedge.run.main", "pipeedge.run.pipeline"),
    *("pipeedge.run.preview", "pipeedge.run.reporting", "pipeedge.observe.live", "pipeedge.base.console"),
    *("pipeedge.train.main", "pipeedge.train.session", "pipeedge.transport.rpc"),
    *("pipeedge.transport.p2p", "pipeedge.transport.tcp", "jinja2"),
    *("processes", "quick_python", "training_ranks"),
)

gc.disable()
for name in MODULES:
    importlib.import_module(name)
gc.freeze()
gc.enable()
