"""What every method stands on: the frame around a step, its state, and parts that several methods share."""
