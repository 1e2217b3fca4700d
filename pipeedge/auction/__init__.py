"""Schedule without a planner: each device bids for the shards that it can hold, and only the bids count.

    rank 0, the auctioneer                                     every rank, a bidder
    ┌─────────────────────────────┐      a control session     ┌──────────────────────────┐
    │ Sale: checks each bid as it │<─ hello {rank, world, host}│ its own device type,     │
    │ comes                       │── brief {model, sizes} ───>│ its own links            │
    │                             │<─ facts {seconds, links} ──│                          │
    │ bids ─> ordered | optimal   │── plan {schedule} ────────>│ prints it, or runs it    │
    └─────────────────────────────┘                            └──────────────────────────┘

market     the call for bids, the bids, and their checks (pure)
tables     what device types bid, by the native scheduler
ordered    the best schedule in a given order of devices (pure)
optimal    the best one in any order, by the native solver
sale       which bids count, and who is left out (pure)
house      the auction as a session of ``pipeedge.control``
options    revauct.py's command line
main       revauct.py

In a reverse auction the buyer, who has layers to compute, takes the bids that serve it best. A bid is a
time rather than a price, and a device has no reason to give another time than that of its profile.
"""
