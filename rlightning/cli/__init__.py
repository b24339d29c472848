"""The ``rlightning`` command."""
