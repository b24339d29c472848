"""The operator's dealings with the API server: requests, a cache of what it holds, a queue of jobs, the writes."""
