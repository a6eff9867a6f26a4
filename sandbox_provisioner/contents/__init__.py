"""Guard Jupyter Server's file access against links that a notebook's code makes.

- ``managers``: guarded versions of Jupyter Server's contents managers and checkpoints, and their settings
- ``rebinding``: derive them from Jupyter Server's classes; ``file_handler``: serve ``/files/``
- ``file_functions``: replacements for the file functions that those managers call
- ``beneath``: access files below a folder without races; ``links``: the walk to a file, and the rules for links
- ``entries``: copy and remove entries of open folders, or move them to the trash
"""
