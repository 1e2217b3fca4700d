"""Let the ranks of a run agree on a plan, detect failures, and end together.

    rank 0                                          every rank (0 too)
    ┌──────────────────┐      one TCP connection    ┌─────────────────┐
    │ Hub: HubState,   │<── hello, facts, beat, ───│ Member          │
    │ sans I/O, behind │    ready, lost, done, ...  │  beats, waits   │
    │ one selector     │─── plan, start, verdict, ─>│  for the plan,  │
    │ thread           │    notice, summary, pace   │  gets verdicts  │
    └──────────────────┘                            └─────────────────┘

failures   the reason why a session ended, as data (pure)
clocks     conversion to the hub's clock (pure)
liveness   diagnosis of silent, stuck and slow ranks (pure)
messages   a type for each kind of message, and its encoding (pure)
roster     the ranks that take part, and the phase of each (pure)
attendance admission of ranks, and the ranks that are missing or left out (pure)
telemetry  data that the hub forwards but does not decide by (pure)
verdicts   what a diagnosis has found, in words (pure)
rules      the hub's reaction to each message (pure)
epochs     the hub's rules for going on after a failure: members, epochs (pure)
epoch_member, epoch_messages the same at a rank, and what they say to each other (pure)
turns      the same for the thread of a rank that does the work
failover   the hub's epochs, joined to the ranks of the session (pure)
ledger     the microbatches that are fed but not written (pure)
wire       one end of a connection in memory, in clear or sealed by TLS
connection a socket with such an end
hub        the thread that serves the rules
dialling   connecting to the hub
member     a rank's end of the connection
session    the protocol for programs: hello, brief, facts, plan, ready, start, done, summary

Tensors travel through ``pipeedge.transport``; only decisions travel here. A closed connection is detected
at once, a silent host by its missing heartbeats, and a dead link by counters that stop growing. The first
cause found is the verdict, and every rank reports the same one.
"""
