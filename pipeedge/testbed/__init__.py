"""A cluster on one machine: several hosts of different speed, memory and bandwidth, as Linux sees them.

    namespace NAME-switch                         namespace NAME-pi1          control groups NAME/pi1
    ┌──────────────────────────────┐              ┌────────────────────┐     ┌──────────────────────┐
    │ br0 ── pi1 ── htb ──────────────── veth ─────── htb ── eth0      │     │ processor time       │
    │      ├ pi2 ── htb ────── ...  │             │         10.213.0.1 │ <── │ memory               │
    │      └ pi3 ── htb ────── ...  │             │ /etc/hosts, name   │     │ processes of the host│
    └──────────────────────────────┘              └────────────────────┘     └──────────────────────┘

cluster    what is to be emulated, from CLUSTER.yml (pure)
journal    what was made, written down before it is made; so that all of it can be taken away again
groups     control groups, version 1 or 2
network    namespaces, cables, rates
bed        all of it, up and down; how a command gets into a host
main       tools/testbed.py

The switch has a namespace of its own, so that the machine's own network shows nothing of it and no address
of it can be in the way.
"""
