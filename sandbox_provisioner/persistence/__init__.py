"""The stored state of a sandbox: its document, checkpoints and file snapshots.

- ``metadata``: the contents of metadata.json; ``document``: read and change it by fenced compare-and-swap
- ``decoding``: decode JSON that others wrote into typed objects; ``records``: the local record of a sandbox
- ``signing``: sign documents with the user's key
- ``checkpoints``: store and load images; ``capture``: record the files that an image depends on
- ``compatibility``: whether an image fits this machine; ``digest_cache``: cached hashes of files;
  ``packages``: name the Python packages that files belong to
- ``snapshots``: the files that a sandbox wrote; ``tar_check``: check the structure of their tar
- ``backends``: choose stores and leases from the settings; ``names``: ids and object names
- ``staging``: temporary folders for images
"""
