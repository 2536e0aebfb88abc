"""What a running job recorded: merged, compared with the prediction, and drawn."""
