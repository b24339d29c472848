"""Import paths that policies written for earlier RLightning versions use."""
