"""The explorer's pages."""
