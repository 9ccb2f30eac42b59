"""Inside a training job: live state filled from a checkpoint, and written as one."""
