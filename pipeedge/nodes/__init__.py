"""From a box of boards to a running model: nodes that wait for work, and the commands that ask them.

    pipeedge up ──> node (asked) ──> deployment ──> rank 0, and a rank on every other node
                      ^   ^  └─ discovery, peer ──> node, node, ...
    status, ask, down ┘   └─ talk over TLS: messages

messages, programs      what can be asked of a node, and what it runs then
talk, peer              conversations, from both ends
store, identity         what a node keeps, and its key
pieces                  weights, of which it fetches what its ranks read
pairing, inviting       joining by a code
discovery, facts        who is here
composing               from profiles to the files of a plan
deployment              from a plan to a run, and on
node, main              a node as a program
options, commands       the other programs
"""
