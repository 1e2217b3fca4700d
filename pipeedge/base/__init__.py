"""The foundation of every other package: errors, wording, atomic files, the console, payloads, schedules."""
