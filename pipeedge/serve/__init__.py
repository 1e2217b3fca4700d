"""Requests that wait for answers, instead of files: the other pair of a source and a sink.

batching     items that wait -> microbatches
preparing    sentences, images and arrays -> items
answers      outputs of the model -> classes with names and scores, vectors
requests     the queue of requests, which is both source and sink
"""
