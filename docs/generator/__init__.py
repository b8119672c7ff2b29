"""The documentation as a site: `python -m docs.generator [FOLDER]`, or `make docs`."""
