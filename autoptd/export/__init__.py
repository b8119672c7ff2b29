"""Plans written for other systems. Import `megatron` for Megatron-LM's arguments, `torch_program` for a
program that needs only torch, `mapping` for a table of placements. Imports `plans` and codegen's
quoting, never the search, the runtime or `explain`.
"""
