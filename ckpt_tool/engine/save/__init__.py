"""Saving from a training job: staging in the rank's process, writing and committing in a process beside it."""
