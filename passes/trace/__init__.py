"""From a module to one fx graph of ATen ops with symbolic sizes: torch.export with repeated modules
traced once. Private parts of torch are reached from one file each.
"""
