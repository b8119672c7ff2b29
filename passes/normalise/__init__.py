"""Normalisation: passes that bring a traced graph into the one form that all later passes assume, or refuse it.

Import `normalise.normalise`, the ordered list of passes run over a `Traced`; its docstring states the form. Like all of
`passes`, it must not import `plans`, `search`, `codegen` or `runtime`.
"""
