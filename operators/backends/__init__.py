"""Where a job runs: a local process or a pod, behind one interface."""
