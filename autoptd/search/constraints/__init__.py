"""Constraints that a user sets by hand.

`options` reads `fix=` and `assume=`; `assumed` lists the choices that are only predicted; `named` resolves
names of modules and parameters in a graph; `without_effect` finds constraints that change nothing. Other packages
import these modules. Of the search the package imports only `meshes` and `pipeline.partition`.
"""
