"""User-defined backward passes (`autograd.Function`, custom ops, hooks): each call becomes one opaque op, proved by
execution to treat samples independently, or is refused. Import `ops` (the targets of such nodes); the other files are
steps of tracing and normalisation. Must not import `plans`, `search`, `codegen` or `runtime`."""
