"""Checks of the machines before a run (`autoptd doctor`). `facts` gathers what one rank observes, `machine` checks the
facts of all ranks, `network` checks between ranks, `files` checks the checkpoint folder. Imports cost models, plans,
`profile` and communicators, never the search or the API.
"""
