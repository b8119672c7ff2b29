"""Plans written for other systems: Megatron-LM's arguments, a program on torch.distributed alone, a
plain table. Imports `plans` and codegen's quoting.
"""
