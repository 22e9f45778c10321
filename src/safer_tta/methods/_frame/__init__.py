"""The frame of all methods: a step, its state, and parts that several methods share."""
