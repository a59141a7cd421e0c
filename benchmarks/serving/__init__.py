"""What `publish`, `freshness` and `serve` share: models to publish, and the processes that do it."""
