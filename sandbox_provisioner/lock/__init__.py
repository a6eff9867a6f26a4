"""Leases: one owner at a time for a name, across processes and machines."""
