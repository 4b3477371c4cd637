"""Real environments: sandboxes in which an agent works on real files with real programs."""
