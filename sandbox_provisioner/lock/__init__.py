"""Leases: one owner at a time for a name, across processes and machines.

- ``base``: Leases and Lease: acquire, wait, renew, detect a loss, release
- ``local``: locked files on one machine
- ``expiring``: leases that expire; ``objects`` keeps them in any ObjectStore, ``gcs`` in a bucket
"""
