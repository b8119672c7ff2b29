"""The command line: `main` has the parser, and one file per command runs it. `main.main` is the entry point.
It may import every other package, and no package imports it. Imports that need torch are made inside the commands.
"""
