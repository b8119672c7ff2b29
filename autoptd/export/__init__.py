"""A plan in the words of other systems: Megatron-LM's arguments, a torch.distributed program, a table of tensors."""
