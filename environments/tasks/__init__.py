"""Tasks: features taken out of packages, checked, split, and put into words."""
