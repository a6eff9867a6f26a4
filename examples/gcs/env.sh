# Kernels of notebooks are kept in a bucket of Google Cloud Storage, for any server that has these settings.
# Use: BUCKET=my-bucket . examples/gcs/env.sh; jupyter lab
: "${BUCKET:?name your bucket, without gs://}"
export SANDBOX_METADATA_BUCKET="$BUCKET"
export SANDBOX_LOCK_BUCKET="$BUCKET"
export SANDBOX_CHECKPOINT_BUCKET="$BUCKET"
export FILESYSTEM_SNAPSHOT_BUCKET="$BUCKET"
# A sandbox is found by its user's name, its notebook's path and its kernel. Where many people have the same name, as
# they have in containers, each needs a prefix of their own.
export SANDBOX_OBJECT_PREFIX="sandboxes/$(id -un)"
# What is kept is signed, so that nobody else can change it. All servers of one user need the same key, and each user another:
# `openssl rand -hex 32` makes one, to be kept like a password.
: "${SANDBOX_SIGNING_KEY:?make a key for your servers: openssl rand -hex 32}"
export SANDBOX_SIGNING_KEY
# The server that opens a notebook gets it from the server that has it.
export SANDBOX_ENABLE_HANDOFF=1
