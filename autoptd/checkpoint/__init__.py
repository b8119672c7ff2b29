"""Checkpoints that any plan can read: saved asynchronously, verified by SHA-256, read as data without
unpickling. Import `Session` to save and load a running model, `contents` and `folder` to inspect
checkpoints, `huggingface` for safetensors, `dcp` for checkpoints of plain torch. Imports the runtime
and `plans`, never `compile` or `explain`.
"""
