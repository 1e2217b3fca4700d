"""Options of a run, from the command line and the environment."""
