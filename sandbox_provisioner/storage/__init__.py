"""Objects with generations: one interface, in a local folder, a mounted folder, Google Cloud Storage, or memory."""
