"""The routes: jobs, and probes with metrics."""
