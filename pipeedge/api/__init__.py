"""The pipeline as an object of Python.

ranks      ranks of a pipeline as processes of this machine
pipeline   Pipeline: rank 0 in a thread, with a queue of requests for its ends
"""
