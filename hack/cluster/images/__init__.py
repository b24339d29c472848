"""Container images without a registry: built by buildah, kept unpacked in a template that every node starts from."""
