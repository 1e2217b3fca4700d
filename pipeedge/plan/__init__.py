"""Plan a run: models and devices, the scheduler, predictions, better plans for a running pipeline.

specs            models, device types and links as data (pure)
sched_pipeline   runs the program that reads the scheduler's YAML files and schedules
spec_files       the contents of the files, from sched-pipeline
spec_writing     writes these files, and adds entries to them
problem          a scheduling problem as data (pure)
placing          stages on hosts, as the scheduler names them (pure)
costs            what a plan costs, as the scheduler states it (pure)
scheduler        the one door to sched-pipeline: problems in, solutions out
schedule_files   schedules in files
choice           what the scheduler is to choose: the cut, number types, bits, microbatch size
listed_model     a model that only models.yml knows (pure)
schedule_choice  the schedule that the options ask for
facts            what each rank states before a run, and where ranks disagree (pure)
model_limits     options that a kind of model does not have
cache_size       the size of a decoder's cache (pure)
cache_owners     the stages that have kept their caches when the plan changes (pure)
planning         the plan that rank 0 announces
prediction       what was predicted beside what was measured (pure)
after_loss       the schedule for the ranks that are left (pure)
link_speed       the bandwidth and latency of a link, from repeated measurements (pure)
change_detection windows over the work of stages, and what has moved (pure)
conditions       hosts and links as a run finds them (pure)
live_choice      whether a running pipeline should have another plan (pure)
live_search      the scheduler's answers for a running pipeline
"""
