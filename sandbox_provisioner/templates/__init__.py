"""Templates: kernels that are checkpointed before they serve, and restored as a copy for each start.

- ``spec``: everything that a template is made from; ``match``: find the current template for a start
- ``start``: start a kernel as a copy of its template, or without one
- ``build``: make a template in a separate process; ``store``: the templates on this user's disk
- ``warm_pool``: copies that already run and wait for a start
"""
