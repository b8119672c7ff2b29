"""The plan: all decisions of the search, as data that is written to and read from JSON. Import `Plan` from
`plans.model`; code that shows or checks plans imports `plans.data`. Imports neither the search nor the runtime.
"""
