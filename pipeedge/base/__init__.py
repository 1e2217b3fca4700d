"""What every room stands on: errors, wording, whole-or-nothing files, the console, payloads, schedules."""
