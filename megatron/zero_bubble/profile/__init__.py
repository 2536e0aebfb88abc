"""Times of passes and messages, measured on the running job."""
