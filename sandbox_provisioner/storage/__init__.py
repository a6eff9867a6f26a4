"""Objects with generations: one interface, implemented by a local folder, a mounted folder and GCS.

- ``base``: ObjectStore, the interface; ``names``: valid object names
- ``local``, ``mounted``: files in a folder (shared by both: ``folder``, and ``disk`` for single files)
- ``gcs``: Google Cloud Storage (``gcs_requests``: retries and errors)
- ``parts``: large files in parts, with checksums; ``verified_files``: those that need not be read again
"""
