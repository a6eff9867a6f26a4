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
# The server that opens a notebook gets it from the server that has it.
export SANDBOX_ENABLE_HANDOFF=1
