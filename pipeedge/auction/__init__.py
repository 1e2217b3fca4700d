"""Schedule without a planner: each device bids for the shards that it can hold, and only the bids count.

    rank 0, the auctioneer                                     every other rank, a bidder
    ┌─────────────────────────────┐                            ┌──────────────────────────┐
    │ Sale: the rules, sans I/O   │<─ hello {rank, world, host}│ its own device type,     │
    │ House: sockets, a deadline  │── call {model, sizes} ────>│ its own links            │
    │                             │<─ bid {seconds, links} ────│                          │
    │ bids ─> ordered | optimal   │── result {schedule} ──────>│ prints it, or runs it    │
    └─────────────────────────────┘                            └──────────────────────────┘

market     the call for bids, the bids, and their checks (pure)
ordered    the best schedule in a given order of devices (pure)
optimal    the best one in any order, by the native solver
sale       the rules: who has bid, and who has not (pure)
house      the auctioneer's and a bidder's end of the connections
options    revauct.py's command line
main       revauct.py

In a reverse auction the buyer, who has layers to compute, takes the bids that serve it best. A bid is a
time rather than a price, and a device has no reason to give another time than that of its profile.
"""
