"""What other systems call the choices that `fix` takes, for the suggestion that an unknown name is answered with.

Imports nothing: the command line reads it without torch.
"""

MEANT = {  # a part of their name -> ours; the first that fits counts
    "virtual": "virtual",
    "chunk": "virtual",
    "interleav": "virtual",
    "sequence": "sequence_parallel",
    "schedule": "schedule",
    "tensor": "tp",
    "pipeline": "pp",
    "context": "cp",
    "checkpoint": "recompute",
    "recomput": "recompute",
    "remat": "recompute",
    "zero": "zero",
    "fsdp": "zero",
    "micro": "micro",
    "mbs": "micro",
    "data_par": "dp",
    "bucket": "bucket_bytes",
    "model_par": "tp",
}
