"""The explorer's charts."""
