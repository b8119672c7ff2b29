"""What an evaluation step runs of a program that was traced in training, beside what the model computes in eval mode.
Import `first_difference` from `difference`."""
