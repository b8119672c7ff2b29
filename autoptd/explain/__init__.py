"""Text about a plan for people: summary, comparison, memory, timeline. Imports `plans.data`; only
`memory` needs the traced model.
"""
