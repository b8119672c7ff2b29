"""Flat buffers of parameters and gradients, sharded over data-parallel ranks (ZeRO 0 to 3; Rajbhandari
et al. 2020): reduction of gradients and gathering of parameters.
"""
