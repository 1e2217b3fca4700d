"""Links between stages: ordered, bounded, and monitored for failures.

A link carries packets from one rank to another, in order. The rest of the package uses ``Link``, ``Sender``
and ``Receiver`` of ``transport.base``. They are implemented in memory (``loopback``, for neighbours on one
rank and for tests), over gloo (``p2p``) and over RPC (``rpc``). ``frame`` is pure.
``membership`` decides, with a key, who is heard on links and control.
"""
