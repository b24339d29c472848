"""The status service: a read-only REST view of RLJobs, for programs and pages that do not speak to Kubernetes.

Nothing is kept here: every answer is read from the API server when it is asked for. The service reads with its own
account, and only after the API server has said that the caller may (``access.py``).
"""
