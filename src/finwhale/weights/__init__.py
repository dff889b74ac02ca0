"""A model's weights: from checkpoints, dummies and updates to the tensors of one rank."""
