"""Objectives beside a single scalar loss: metrics of an evaluation, and the named terms of a loss."""
