"""Communication between ranks: the interfaces of groups and channels, over torch.distributed
(`processes`) or over threads of one process (`threaded`).
"""
