"""A stranger's package, which has the name of one of Sidestage's."""
