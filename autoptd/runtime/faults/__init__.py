"""Fault handling: heartbeats, the watchdog that ends every rank with the first cause of a fault, and the origin of
non-finite values. Other packages import `Timeouts` and `PendingComm`. As part of `runtime` it never imports `passes`,
`explain`, `search` or `codegen`."""
