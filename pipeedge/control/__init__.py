"""Let the ranks of a run agree on a plan, detect failures, and end together.

    rank 0                                          every rank (0 too)
    ┌──────────────────┐      one TCP connection    ┌─────────────────┐
    │ Hub: HubState,   │<── hello, facts, beat, ───│ HubClient       │
    │ sans I/O, behind │    ready, passed, done, ...│  beats, waits   │
    │ one selector     │─── plan, prepare, run, ───>│  for the plan,  │
    │ thread           │    verdict, summary, pace  │  gets verdicts  │
    └──────────────────┘                            └─────────────────┘

failures      the reason why a session ended, as data (pure)
clocks        conversion to the hub's clock (pure)
liveness      diagnosis of silent, stuck and slow ranks (pure)
load_deadline the time that a rank has for loading (pure)
messages      a type for each kind of message, and its encoding (pure)
announcement  the plan of a session, with what the hub has to know about it (pure)
roster        the ranks that take part, and those that wait for a number (pure)
attempts      the epochs that are active, and the links that have broken (pure)
changing      changing the plan of a run while it runs (pure)
epochs        the hub's rules: which epoch is active, and what a loss changes; has the table (pure)
epoch_member  the rules of a rank for them, with its table (pure)
turns         ``epoch_member`` for the threads of a rank that do the work
admission     admission of ranks, and the ranks that are missing or left out (pure)
telemetry     data that the hub forwards but does not decide by (pure)
rank_watch    the ages that a diagnosis needs, and its findings in words (pure)
losses        the event that the loss of a rank or a link is (pure)
plans         the plan that is wanted, made, or better than the one that runs (pure)
rank_messages the hub's reaction to each message of a rank (pure)
supervision   the hub's reaction to the passage of time (pure)
rules         all of these together (pure)
wire          one end of a connection in memory, in clear or sealed by TLS
connection    a socket with such an end, dialled or accepted by the hub
hub           the thread that serves the rules
hub_address   connecting to the hub
uplink        exchanging messages with the hub, from any thread
hub_client    a rank's end of the connection
forms         what a program supplies to a session
session       the protocol for programs: hello, brief, facts, plan, ready, start, done, summary

Tensors travel through ``pipeedge.transport``; only decisions travel here. A closed connection is detected
at once, a silent host by its missing heartbeats, and a dead link by counters that stop growing. The first
cause found is the verdict, and every rank reports the same one.
"""
