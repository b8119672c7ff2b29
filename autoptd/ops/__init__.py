"""What emitted stage files import: the stage class, the tp and cp axes, and ops with an implementation
of their own. Imports `layout` only, so that passes can name these ops without the runtime.
"""
