"""The command line: `main` has the parser, one file per command has what the command does. Nothing
imports it.
"""
