"""``python -m rlightning.cli``, where the console script is not installed."""

from rlightning.cli.app import main

main()
