"""Requests that wait for answers, instead of files: the other pair of a source and a sink.

batching     items that wait -> microbatches
preparing    sentences, images and arrays -> items
answers      outputs of the model -> classes with names and scores, vectors
pending      answers that are awaited
in_flight    items on their way to an answer, and microbatches of them
backlog      all items without an answer: those that wait, and microbatches under way
requests     the queue of requests, which is both source and sink, and its threads
queued_model a model with all of these, for Python and for HTTP

Over HTTP, each module only uses those above it:

bodies, tensors      what clients send, as JSON and as bytes
zero_shot            classes that come with a request
uploads              files in requests
gate                 hosts and keys, limits of bodies, slow clients
asking               items in, answers out, on the event loop
routes, inference    handlers: what clients of other servers know; the Open Inference Protocol
served_text          a decoder with the queue of its sequences, which the package run has
text_bodies, text_replies    conversations: what clients send and get
text_asking, text_routes     prompts in, answers out, on the event loop; handlers
pages                the pages; figures and pipeline_state: what they tell; description, reference: all routes
application          all routes
http_server, http_ends  connections, their limits and their end; from the first rank to the last reply
"""
