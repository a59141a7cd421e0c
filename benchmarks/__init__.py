"""Measurements and the demo. They import everything and are imported by nothing."""
