"""Policies as Ray actors."""
