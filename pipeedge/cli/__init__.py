"""The command ``pipeedge``: every program under one name.

commands     the programs, with their modules as text, so that none is imported before it is needed
chat         pipeedge chat: a conversation with a decoder
fetch        pipeedge fetch: weights of the known models
schedule     pipeedge schedule: becomes the native sched-pipeline
config       pipeedge config: where the value of each option comes from
completion   pipeedge completion: scripts for the shell
main         chooses the program
"""
