"""Executes step plans on one device: inputs, captured steps, forward, sampling, drafting."""
