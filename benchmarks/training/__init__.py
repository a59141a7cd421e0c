"""The training that saves disturb, and windows of it with and without a save."""
