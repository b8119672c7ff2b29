"""The compiler's passes over an fx graph: `trace`, `normalise` and `fold`, in that order, and the rules and analyses
that the search and code generation read. Import from its modules and subpackages; this file exports nothing. It may
import `layout`, `ops`, `cost_models` and the layers below them, never `plans`, `search`, `codegen` or `runtime`.
"""
