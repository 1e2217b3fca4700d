"""Emulate a cluster on one Linux machine: several hosts of different speed, memory and bandwidth.

    namespace NAME-switch                         namespace NAME-pi1          control groups NAME/pi1
    ┌──────────────────────────────┐              ┌────────────────────┐     ┌──────────────────────┐
    │ br0 ── pi1 ── htb ──────────────── veth ─────── htb ── eth0      │     │ processor time       │
    │      ├ pi2 ── htb ────── ...  │             │         10.213.0.1 │ <── │ memory               │
    │      └ pi3 ── htb ────── ...  │             │ /etc/hosts, name   │     │ processes of the host│
    └──────────────────────────────┘              └────────────────────┘     └──────────────────────┘

cluster       the hosts to be emulated (pure)
cluster_file  reads them from CLUSTER.yml
journal       what is created, written down beforehand so that all of it can be removed again
groups        control groups, version 1 or 2
network       namespaces, virtual cables, rates
bed           building and removing a whole test bed; running a command in a host
main          tools/testbed.py

The switch has a namespace of its own, so that it does not show up in the machine's own network and its
addresses cannot collide with others.
"""
