"""RL on real packages: tasks in sandboxes, for a checkpoint from elsewhere (`etude run recipe --tasks RECIPES`)."""
