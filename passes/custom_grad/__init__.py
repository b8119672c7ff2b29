"""User-defined backward passes (`autograd.Function`, custom ops, hooks): each call becomes one opaque op, proved by
execution to treat samples independently, or is refused.

Tracing imports `hooks` and `trace_calls`, normalisation `calls` and `proof`; rules and `codegen` import `ops`. Like all
of `passes`, it must not import `plans`, `search`, `codegen` or `runtime`.
"""
