"""Guard Jupyter Server's file access against links that a notebook's code makes.

- ``managers``: guarded versions of Jupyter Server's contents managers and checkpoints
- ``file_functions``: replacements for the file functions that those managers call
- ``beneath``: access files below a folder without races; ``trash``: move a file to the trash that way
"""
