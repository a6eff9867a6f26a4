"""Objects with generations: one interface, implemented by a local folder, a mounted folder and GCS.

- ``base``: ObjectStore, the interface; ``names``: valid object names
- ``local``, ``mounted``: files in a folder (``folder``, ``tree`` and ``disk`` are shared by both)
- ``gcs``: Google Cloud Storage (``gcs_requests``: retries and errors; ``gcs_parts``: streams for parts of files)
- ``parts``: large files in parts, with checksums; ``verified_files``: those that need not be read again
"""
