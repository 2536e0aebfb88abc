"""What was measured on a running job, as costs that a search can use."""
