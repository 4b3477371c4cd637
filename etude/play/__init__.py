"""`etude play`: rollouts of an agent, on the terminal and as HTML."""
