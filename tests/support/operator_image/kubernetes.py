"""In front on PYTHONPATH, this makes the package ``kubernetes`` as absent as it is from the operator's image.

kopf imports it where it is installed, as it is for the tests, without any use: 26 MB and a second of each start.
"""

raise ImportError("the operator's image has no package kubernetes")
