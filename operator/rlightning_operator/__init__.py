"""The control plane: turns RLJobs into Ray clusters that train, and says how they do. Never imports torch or ray."""
