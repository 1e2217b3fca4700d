"""Plan a run: models and devices, the scheduler, number types, predictions, simulation.

specs            models, device types and links as data (pure)
sched_pipeline   runs the program that reads the scheduler's YAML files and schedules
spec_files       the contents of the files, from sched-pipeline
spec_writing     writes these files, and adds entries to them
problem          a scheduling problem as data (pure)
scheduler        the one door to sched-pipeline: problems in, solutions out
schedule_files   schedules in files
dtype_choice     the number type of a run (--dtype auto)
joint_choice     microbatch size, cut, hosts, number types and bits together (--plan auto)
listed_model     a model that only models.yml knows (pure)
schedule_choice  the schedule that the options ask for
facts            what each rank states before a run, and where ranks disagree (pure)
planning         the plan that rank 0 announces
prediction       what was predicted beside what was measured (pure)
simulation       a run that is computed instead of run (pure)
after_loss       the schedule for the ranks that are left (pure)
link_speed       the bandwidth and latency of a link, from repeated measurements (pure)
"""
