"""A schedule without a planner: each device bids for the shards that it can hold, and the bids are all that
counts.

    rank 0, the auctioneer                                     every other rank, a bidder
    ┌─────────────────────────────┐                            ┌──────────────────────────┐
    │ Sale: the rules, sans I/O   │<─ hello {rank, world, host}│ its own device type,     │
    │ House: sockets, a deadline  │── call {model, sizes} ────>│ its own links            │
    │                             │<─ bid {seconds, links} ────│                          │
    │ bids ─> ordered | optimal   │── result {schedule} ──────>│ prints it, or runs it    │
    └─────────────────────────────┘                            └──────────────────────────┘

market     bids, and what the auctioneer asks for; checks (pure)
ordered    the best schedule in a given order of devices (pure)
optimal    the best one in any order, by the native solver
sale       who has said what, who is silent (pure)
house      the auctioneer's and a bidder's end of the connections
options    revauct.py's command line
main       revauct.py

A reverse auction: the buyer, who has layers to be computed, takes the bids that serve it best. What a bid
says is a time, not a price; a device has no reason to say another than that of its profile.
"""
