"""The stages of the recipe on many ranks."""
