"""Pure decisions: a snapshot of a job's objects in, a plan out. No I/O, no kopf, no client of the API server."""
