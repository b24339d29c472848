"""Engines: the order in which members act, learn and are told of new weights."""
