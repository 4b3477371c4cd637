"""`etude plan`: what full runs cost."""
