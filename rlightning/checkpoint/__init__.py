"""Checkpoints: saved atomically, verified to the byte, resumed exactly.

``tree`` turns nested state into JSON and arrays and back, ``tensor_file`` puts arrays into a safetensors file,
``manifest`` says what a checkpoint consists of, ``store`` saves and loads, ``verify`` looks for damage. Every
operation that changes the disk goes through ``durable``.
"""
