"""Let the ranks of a run agree on a plan, detect failures, and end together.

    rank 0                                          every rank (0 too)
    ┌──────────────────┐      one TCP connection    ┌─────────────────┐
    │ Hub: HubState,   │<── hello, facts, beat, ───│ Member          │
    │ sans I/O, behind │    ready, lost, done, ...  │  beats, waits   │
    │ one selector     │─── plan, start, verdict, ─>│  for the plan,  │
    │ thread           │    notice, summary, beat   │  gets verdicts  │
    └──────────────────┘                            └─────────────────┘

messages   what is said, and its bytes (pure)
failures   why a session ended, as data (pure)
clocks     what the hub's clock shows (pure)
liveness   who is silent, who is stuck, who is only slow (pure)
roster     who takes part, and how far each rank is (pure)
attendance who is admitted, who is waited for, and who is left out (pure)
telemetry  what the hub passes on without deciding anything by it (pure)
rules      what the hub makes of each message (pure)
hub        the thread that serves the rules
member     a rank's end
session    how a program takes part: hello, brief, facts, plan, ready, start, done, summary

Tensors travel through ``pipeedge.transport``; only decisions travel here. A closed connection is detected
at once, a silent host by its missing heartbeats, and a dead link by counters that stop growing. The first
cause found is the verdict, and every rank reports the same one.
"""
