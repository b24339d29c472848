"""A run in a Kubernetes cluster: the driver in Ray's head pod, and the submitter that starts and follows it."""
