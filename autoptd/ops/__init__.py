"""The library that emitted stage files import: the stage class, the tp and cp axes, and ops with an implementation of
their own. Passes and runtime may import every module. Imports `layout` and what is below it, never the runtime.
"""
