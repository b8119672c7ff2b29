"""Comparison of what two traces of a model compute: of training, as an evaluation step runs it, with the model in eval
mode; and for any number of samples with one sample alone. Import from `difference`."""
