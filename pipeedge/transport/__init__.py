"""Links between stages: ordered, bounded, never silent.

A link carries packets from one rank to one other, in order. What the rest of the package sees is
``Link``, ``Sender`` and ``Receiver`` of ``transport.base``; behind them stand memory (``loopback``,
for neighbours on one rank and for tests) and gloo (``p2p``). ``frame`` and ``channel`` are pure.
"""
