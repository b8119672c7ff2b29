"""Communication between ranks: the interfaces of groups and channels, implemented over torch.distributed (`processes`)
and over threads of one process (`threaded`). Other packages import `Communicators`, `connect_processes`,
`run_lockstep`, `shared_plan` and the functions of `listening`. As part of `runtime` it never imports `passes`,
`explain`, `search` or `codegen`."""
