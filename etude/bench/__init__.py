"""`etude bench`: one file for each thing that is timed; what they find goes to results/."""
