"""What a run is asked to do: its options, from the command line and the environment."""
